import json
from dataclasses import asdict, replace

import pytest

from mxfp8_titan.report.inventory import peak, read_inventory, tokens_per_step
from mxfp8_titan.trainer import INVENTORY
from tests.report.runs import H200, inventory_of


def test_the_trainer_s_line_is_read_back():
    line = f"[rank0]:[titan] x - root - INFO - {INVENTORY}{json.dumps(asdict(inventory_of(dense=3)))}\n"
    read = read_inventory(f"before\n{line}after\n")
    assert read.converted == "3 of 4 linears"
    assert read.runs_on == "mxfp8_hopper on hopper, GEMMs auto"


def test_a_log_without_it_is_an_error():
    with pytest.raises(ValueError, match="not started by mxfp8_titan.train"):
        read_inventory("nothing\n")


def test_tokens_of_a_step_are_read_back_from_the_log():
    line = (
        "[rank0]:x - Trainer is initialized with local batch size 2, global batch size 8, "
        "gradient accumulation steps 2, sequence length 64, total steps 14 (warmup 2)"
    )
    assert tokens_per_step(f"before\n{line}\nafter") == 8 * 64


def test_converted_modules_of_another_converter_are_named_by_their_class():
    torchao = replace(inventory_of(), dense={"Float8Linear": (3, 300), "Linear": (1, 100)})
    assert (torchao.converted, torchao.runs_on) == ("3 of 4 linears", "Float8Linear")
    assert (inventory_of().converted, inventory_of().runs_on) == ("nothing", "bf16")


def test_shares_are_of_flops_and_a_bf16_weight_gradient_is_a_third_of_them():
    both = inventory_of(dense=3, experts=1)
    assert both.converted_share(both.dense) == pytest.approx(0.75)
    assert both.fp8_share == pytest.approx(6 * 500 / 4000)
    bf16_wgrad = inventory_of(dense=3, wgrad="bf16")
    assert bf16_wgrad.converted_share(bf16_wgrad.dense) == pytest.approx(0.5)


def test_the_peak_weighs_precisions_by_their_flops_and_emulation_is_bf16():
    assert peak(H200, inventory_of()) == ("H200 bf16, 989 TFLOP/s", 989e12)
    name, flops = peak(H200, inventory_of(dense=3, experts=1))
    assert flops == pytest.approx(1e12 / (0.75 / 1979 + 0.25 / 989))
    assert name.startswith("H200 75 % FP8")
    assert peak(H200, inventory_of(dense=3, backend="reference"))[1] == 989e12


def test_a_board_with_a_lower_clock_has_its_own_peak_and_an_unknown_device_none():
    assert peak("1 x NVIDIA H100 PCIe", inventory_of())[1] == 756e12
    assert peak("none, 2 CPU cores", inventory_of()) is None
