"""Checksums of files that lie on users' disks: they may not change."""

from __future__ import annotations

import numpy as np
import torch
import xxhash

from xdm_ft.storage.digests import digest, json_digest, tensors_digest


def test_texts_arrays_and_tensors_are_their_bytes_one_after_the_other() -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    expected = xxhash.xxh3_64("τ".encode() + array.tobytes()).hexdigest()
    assert digest("τ", array) == digest("τ", torch.from_numpy(array)) == expected
    assert digest("τ", array.T.copy().T) == expected, "however they lie in memory"
    assert digest(array, bits=128) == xxhash.xxh3_128(array.tobytes()).hexdigest()
    half = torch.tensor([1.0, -2.5], dtype=torch.bfloat16)
    assert digest(half) == xxhash.xxh3_64(b"\x80\x3f\x20\xc0").hexdigest()
    assert digest(torch.zeros(0)) == digest("") == xxhash.xxh3_64(b"").hexdigest()


def test_names_types_and_shapes_count() -> None:
    one = {"w": torch.zeros(2, 3)}
    others = [{"v": torch.zeros(2, 3)}, {"w": torch.zeros(3, 2)}, {"w": torch.zeros(2, 3, dtype=torch.int32)}]
    assert len({tensors_digest(tensors) for tensors in (one, *others)}) == 4
    assert tensors_digest(one) == xxhash.xxh3_64(b"w torch.float32 [2, 3]\n" + bytes(24)).hexdigest()
    assert tensors_digest(one, "about") != tensors_digest(one)


def test_a_json_value_is_what_is_read_of_it_again() -> None:
    assert json_digest({"b": 1, "a": (2, None)}) == json_digest({"a": [2, None], "b": 1})
    assert json_digest({10: 1, 9: 2}) == json_digest({"10": 1, "9": 2})
    assert json_digest({"a": 1}) == xxhash.xxh3_64(b'{"a": 1}').hexdigest()
