"""stub"""
import msgspec


class CacheEvents(msgspec.Struct, kw_only=True):
    """Prefix-cache changes since the last frame: 16-byte block hashes. `sequence` numbers the first of them; a gap
    means that the receiver must ask for everything again (`complete` marks such a full list)."""

    sequence: int
    stored: list[bytes] = []
    evicted: list[bytes] = []
    complete: bool = False
