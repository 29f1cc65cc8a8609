"""The client keys of the channels in one Ray cluster: made once, kept by the cluster itself. Knows Ray, no deployment.

An application that is deployed again must find the keys of before: edges that still end their streams have to reach the
new engines, and new edges the old engines. They are as well protected as everything that Ray hands out.
"""

from __future__ import annotations

import msgspec
import ray
from ray.experimental import internal_kv

from .channel import KeyPair

_NAMESPACE = b"manta"
_KEY = b"channel/client-keys"


def cluster_keys() -> KeyPair:
    """Those of the Ray that is connected, made by whoever asks first; new ones each time without a Ray."""
    if not ray.is_initialized():
        return KeyPair.new()
    made = msgspec.msgpack.encode(KeyPair.new())
    internal_kv._internal_kv_put(_KEY, made, overwrite=False, namespace=_NAMESPACE)
    kept = internal_kv._internal_kv_get(_KEY, namespace=_NAMESPACE)
    assert kept is not None
    return msgspec.msgpack.decode(kept, type=KeyPair)
