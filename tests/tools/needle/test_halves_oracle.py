"""The oracle has as many keys as the method meets exactly."""

import math

import pytest
import torch

from subquad.methods import parse_method
from subquad.tools.needle.halves_oracle import mean_exact_keys, oracle_of

FP32 = torch.float32


@pytest.mark.parametrize("length", [64, 65, 128, 200, 333, 512])
@pytest.mark.parametrize("last", [0, 16])
def test_exact_keys_are_those_of_the_block_and_of_one_rectangle_for_each_bit_of_its_number(length, last):
    method = parse_method(f"clustered-tail:block=64,last={last},topk=10,clusters=5")
    counts = [i % 64 + 1 + 10 * (i // 64).bit_count() for i in range(length)]
    counts = [i + 1 if i >= length - last else count for i, count in enumerate(counts)]
    assert mean_exact_keys(method, length, FP32) == pytest.approx(sum(counts) / length)


def test_top_keys_grow_with_the_rectangle_if_their_number_is_not_set():
    method = parse_method("clustered-tail:block=64,last=0")
    top = {bit: math.ceil(math.sqrt(32 * 64 * 2**bit)) for bit in range(3)}  # of rectangles of 64, 128, 256 keys
    counts = [i % 64 + 1 + sum(count for bit, count in top.items() if i // 64 >> bit & 1) for i in range(64 * 6)]
    assert mean_exact_keys(method, 64 * 6, FP32) == pytest.approx(sum(counts) / len(counts))


def test_there_are_no_more_top_keys_than_keys():
    method = parse_method("clustered-tail:block=64,last=0,topk=1000")
    assert mean_exact_keys(method, 256, FP32) == pytest.approx(257 / 2)


def test_a_prompt_of_one_block_is_exact():
    assert mean_exact_keys(parse_method("clustered-tail:block=64"), 50, FP32) == pytest.approx(51 / 2)


def test_the_oracle_is_that_of_the_first_method_with_top_keys_by_halves():
    methods = [parse_method(text) for text in ("local", "clustered", "i-clustered:topk=7,block=8,last=0", "lha-tail")]
    matched, oracle = oracle_of(methods, 64, FP32)
    assert matched == methods[2]
    assert oracle.topk == round(4.5 + 7 * 1.5)
    assert oracle_of(methods[:2], 64, FP32) is None


def test_the_default_block_is_longer_in_16_bits_so_the_oracle_has_more_keys_there():
    method = parse_method("clustered-tail:last=0,topk=10")
    assert mean_exact_keys(method, 2048, FP32) == pytest.approx(512.5 + 10 / 2)
    assert mean_exact_keys(method, 2048, torch.bfloat16) == pytest.approx(2049 / 2)
