# vLLM with kvass: docker build -f deploy/engine.Dockerfile -t kvass-engine .   (from the repository's root)
# For CPUs: --build-arg VLLM=public.ecr.aws/q9t5s3a7/vllm-cpu-release-repo:v0.32.0
ARG VLLM=vllm/vllm-openai:v0.32.0
FROM python:3.11-slim AS build
COPY . /src
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels /src

FROM ${VLLM}
USER 0
COPY --from=build /wheels /wheels
# The only version there is was just built.
# hadolint ignore=DL3013
RUN python3 -m pip install --no-cache-dir /wheels/*.whl && rm -rf /wheels \
 && install -d -o 1000 -g 1000 /models
# The daemon's user. vLLM caches by user name, and the image may have no name for this one.
USER 1000:1000
ENV HOME=/models USER=engine KVASS_SOCKET=/run/kvass/kvass.sock
# The entry point is that of vLLM's image. It needs: --kv-transfer-config, and a mount of /run/kvass.
