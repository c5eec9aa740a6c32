"""Token ids and step vectors as blobs."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from knockout.ledger.rows import NOT_ASKED
from knockout.method.interventions import Intervention, ban
from knockout.tokens.candidates import Candidate

__all__ = [
    "pack_candidate",
    "pack_ids",
    "pack_steps",
    "pack_watched",
    "safe_text",
    "unpack_candidate",
    "unpack_ids",
    "unpack_steps",
    "unpack_watched",
]


_WORDS, _WORDS_AND_BYTES = b"\x01", b"\x02"
"""What begins a blob: 16-bit ids, or their low words followed by their third bytes.

Blobs of wider ids, and all that were written before there was such a mark, are zlib alone, which
begins with an "x", and contain four planes of bytes.
"""
_LEVEL = 4
"""Level 6 takes a third more time on text and saves one part in a hundred."""


def pack_ids(ids: NDArray[np.int32]) -> bytes:
    """Compresses token ids (T,).

    Words of 16 bits keep what text repeats whole, so zlib finds it; ids of larger vocabularies add
    a byte each, mostly 0 since common tokens have low ids.
    """
    whole = np.ascontiguousarray(ids, dtype="<i4")
    top = int(whole.view("<u4").max(initial=0))
    if top >= 1 << 24:
        planes = whole.view(np.uint8).reshape(-1, 4).T
        return zlib.compress(np.ascontiguousarray(planes).tobytes(), level=_LEVEL)
    words = whole.astype("<u2").tobytes()
    if top < 1 << 16:
        return _WORDS + zlib.compress(words, level=_LEVEL)
    high = (whole >> 16).astype(np.uint8).tobytes()
    return _WORDS_AND_BYTES + zlib.compress(words + high, level=_LEVEL)


def unpack_ids(blob: bytes) -> NDArray[np.int32]:
    """The inverse of `pack_ids`: (T,) int32.

    Raises:
        ValueError: The blob is damaged.
    """
    mark = blob[:1]
    try:
        if mark == _WORDS:
            return np.frombuffer(zlib.decompress(blob[1:]), dtype="<u2").astype(np.int32)
        if mark == _WORDS_AND_BYTES:
            raw = zlib.decompress(blob[1:])
            n, rest = divmod(len(raw), 3)
            if rest:
                raise ValueError(f"{len(raw)} bytes are no ids of 3 bytes each")
            words = np.frombuffer(raw, dtype="<u2", count=n).astype(np.int32)
            return words | (np.frombuffer(raw, dtype=np.uint8, offset=2 * n).astype(np.int32) << 16)
        planes = np.frombuffer(zlib.decompress(blob), dtype=np.uint8).reshape(4, -1).T
    except (zlib.error, ValueError) as error:
        raise ValueError(f"damaged token ids: {error}") from None
    return np.ascontiguousarray(planes).view("<i4")[:, 0].astype(np.int32)


def pack_steps(steps: NDArray[np.int32]) -> bytes:
    """The divergence steps of a cell's candidates (C,) as plain little-endian int32."""
    return np.ascontiguousarray(steps, dtype="<i4").tobytes()


def unpack_steps(blobs: list[bytes], n_candidates: int) -> NDArray[np.int32]:
    """The steps of many cells at once: (n, C) int32.

    A cell that was done before the last candidates were added has fewer steps: it has not asked
    them.

    Raises:
        ValueError: One has more steps than there are candidates, or no whole number of them.
    """
    width = 4 * n_candidates
    for blob in blobs:
        if len(blob) > width or len(blob) % 4:
            raise ValueError(f"{len(blob)} bytes of steps for {n_candidates} candidates")
    rest = NOT_ASKED.to_bytes(4, "little", signed=True)
    whole = (b if len(b) == width else b + rest * ((width - len(b)) // 4) for b in blobs)
    flat = np.frombuffer(b"".join(whole), dtype="<i4")
    return flat.reshape(len(blobs), n_candidates).astype(np.int32, copy=False)


def safe_text(text: str | None) -> str | None:
    """Makes a text storable: SQLite takes no lone surrogates, which decoding can leave."""
    return None if text is None else text.encode("utf-8", "backslashreplace").decode("utf-8")


def pack_watched(watched: Mapping[int, int]) -> bytes:
    """Where pairs leave a fork: {candidate: step or `INHERITED`}."""
    flat = [number for pair in sorted(watched.items()) for number in pair]
    return np.array(flat, dtype="<i4").tobytes()


def unpack_watched(blob: bytes) -> dict[int, int]:
    """Reads what `pack_watched` wrote."""
    flat = np.frombuffer(blob, dtype="<i4").reshape(-1, 2)
    return {int(candidate): int(step) for candidate, step in flat}


def pack_candidate(candidate: Candidate) -> tuple[str, str, str, str, str]:
    """A candidate as in its row; the intervention is empty for a plain ban of its ids."""
    record = candidate.intervention.to_record() | {"members": list(candidate.members)}
    plain = candidate.intervention.is_plain_ban and not candidate.members
    return (
        candidate.name,
        json.dumps(candidate.token_ids),
        json.dumps(candidate.tokens),
        candidate.group,
        "" if plain else json.dumps(record, sort_keys=True),
    )


def unpack_candidate(name: str, ids: str, tokens: str, group: str, record: str) -> Candidate:
    """Reads what `pack_candidate` wrote."""
    texts = tuple(json.loads(tokens))
    if not record:
        return Candidate(name, ban(tuple(json.loads(ids))), texts, group)  # type: ignore[arg-type]
    given = json.loads(record)
    members = tuple(given.pop("members"))
    return Candidate(name, Intervention.from_record(given), texts, group, members)  # type: ignore[arg-type]
