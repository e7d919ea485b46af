"""Whether the block hashes of a vLLM request say all of its content.

If equal hashes may mean other content, the request is neither looked up nor stored: vLLM's own
cache confuses such requests of one engine, and a shared cache would confuse those of all. This file
depends on vLLM's version (``adapt.py``).
"""

from __future__ import annotations

import re
from hashlib import sha256
from typing import Any, Final

from vllm import __version__ as vllm_version

from kvass.connectors.vllm.configuration import VllmSetup
from kvass.connectors.vllm.contract import release
from kvass.engine.boundary import log

TAGGED_HASHES: Final = release(vllm_version) >= (0, 31)
"""Whether block hashes tag their texts: as an adapter's name, an adapter's path or a salt."""
MAX_TEXTS: Final = 10_000
"""The maximum number of texts that ``HashedTexts`` remembers, as digests."""

CONTENT_HASH: Final = re.compile("[0-9a-f]{64}|[0-9a-f]{128}")
"""The form of vLLM's content hash of an image or the like: BLAKE3, SHA-256 or SHA-512, in hex."""


class HashedTexts:
    """The meanings of the texts in the block hashes of vLLM before 0.31.

    Such a text is an adapter's name without its path, or a salt. vLLM's own cache confuses two
    adapters of one name, and an adapter with a salt of equal text. So requests with a text that has
    had two meanings run uncached. So do requests with a new text once ``MAX_TEXTS`` are known.
    """

    def __init__(self) -> None:
        self._meanings: dict[bytes, str] = {}

    def note(self, request: Any) -> None:
        """Record the meaning of the request's text. Called before vLLM computes anything for it."""
        text, meaning = self._text_and_meaning(request)
        if not text:
            return
        digest = text_digest(text)
        known = self._meanings.get(digest, meaning)
        if len(self._meanings) < MAX_TEXTS:
            self._meanings.setdefault(digest, meaning)
            if len(self._meanings) == MAX_TEXTS:
                log.warning(
                    "requests with another salt or adapter than the first %d run uncached until "
                    "this engine is restarted; with vLLM 0.31 there is no such limit for salts",
                    MAX_TEXTS,
                )
        if known not in (meaning, ""):
            self._meanings[digest] = ""
            why = "this vLLM's cache takes %s and %s for one; 0.31 does not"
            log.warning(f"requests with %.64r run uncached: {why}", text, known, meaning)

    def ambiguous(self, request: Any) -> bool:
        """Whether requests with different content may have the block hashes of ``request``."""
        text, meaning = self._text_and_meaning(request)
        return bool(text) and self._meanings.get(text_digest(text)) != meaning

    def _text_and_meaning(self, request: Any) -> tuple[str, str]:
        if (lora := request.lora_request) is not None:
            return str(lora.lora_name), f"the adapter {lora.lora_path}"
        return request.cache_salt or "", "a salt"


def text_digest(text: str) -> bytes:
    """A client chooses the text, so it may be long, or no valid Unicode."""
    return sha256(text.encode(errors="surrogatepass")).digest()


def hashed_texts(vllm_config: Any) -> HashedTexts | None:
    """The texts of requests, or None if equal block hashes always mean equal content."""
    return None if TAGGED_HASHES or vllm_config.lora_config is None else HashedTexts()


def is_named(request: Any, setup: VllmSetup, texts: HashedTexts | None) -> bool:
    """Whether equal block hashes mean equal content for ``request``."""
    if _embeds_are_ambiguous(request, setup.dtype):
        return False
    if not setup.global_media_ids and _has_local_media_ids(request):
        return False
    return texts is None or not texts.ambiguous(request)


def _embeds_are_ambiguous(request: Any, dtype: Any) -> bool:
    """Whether the hashes of ``request`` leave out how its embeds are read.

    vLLM hashes the bytes of ``prompt_embeds``, but neither their data type nor which positions take
    a token instead (``prompt_is_token_ids``; there the tensor's values are not used, and a
    position of the tensor has the id 0 in the hash, as token 0 has). ``dtype``: the model's.
    """
    embeds = request.prompt_embeds
    if embeds is None:
        return False
    return request.prompt_is_token_ids is not None or embeds.dtype != dtype


def _has_local_media_ids(request: Any) -> bool:
    """Whether the hashes of ``request`` depend on an id of a media item that is no content hash.

    A client chose such an id (``multi_modal_uuids``), or vLLM numbered the item. The id may stand
    for another image, video or sound in another engine. Every id that does not have the form of a
    content hash counts. The name of a LoRA adapter, which vLLM may put before a hash, is ignored. A
    client's id that vLLM has hashed is not recognized.
    """
    for feature in request.mm_features:
        content = getattr(feature, "mm_hash", None) or feature.identifier
        prefix = feature.identifier.removesuffix(content)
        if not CONTENT_HASH.fullmatch(content) or (prefix and not prefix.endswith(":")):
            return True
    return False
