"""In a fork of ``template``: prints a seed of ``hash()`` and who this engine shares rows with, and
logs a line as vLLM does."""

from __future__ import annotations

from kvass.connectors.vllm import groups, logs
from kvass.engine.boundary import log
from tests.support.vllm.scheduler import make_configs, read_setup


def main() -> None:
    import vllm.logger

    config, caches = make_configs()
    ours = dict(read_setup(config, caches).identity) | groups.page_formats(caches)
    if hasattr(vllm.logger, "configure_logging"):
        from vllm.config.logging import LoggingConfig

        vllm.logger.configure_logging(LoggingConfig())
    else:  # 0.30 does it when it is imported: the template had another level
        vllm.logger._configure_vllm_root_logger()
    logs.log_as_vllm()
    log.info("all is well")
    print((hash("a seed"), ours))  # noqa: T201


if __name__ == "__main__":
    main()
