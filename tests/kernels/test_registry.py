# SPDX-License-Identifier: Apache-2.0
import pytest
import torch

from deepseek_v41_plugin.kernels.registry import Impl, Op, OpError, anywhere

CPU = torch.device("cpu")
NEVER = Impl("cuda", lambda x: "cuda", lambda device: (False, "needs a GPU"))
PLAIN = Impl("torch", lambda x: "torch", anywhere)


def test_the_first_supported_one_runs():
    assert Op("demo", (NEVER, PLAIN))(torch.zeros(1)) == "torch"
    assert Op("demo", (Impl("fast", lambda x: "fast", anywhere), PLAIN))(torch.zeros(1)) == "fast"


def test_a_variable_forces_one(monkeypatch):
    op = Op("demo", (Impl("fast", lambda x: "fast", anywhere), NEVER, PLAIN))
    monkeypatch.setenv("DSV41_OP_DEMO", "torch")
    assert op.choose(CPU) is PLAIN
    assert dict((name, chosen) for name, chosen, _ in op.explain(CPU)) == {"fast": False, "cuda": False, "torch": True}
    monkeypatch.setenv("DSV41_OP_DEMO", "cuda")
    with pytest.raises(OpError, match="DSV41_OP_DEMO=cuda: needs a GPU"):
        op.choose(CPU)
    monkeypatch.setenv("DSV41_OP_DEMO", "other")
    with pytest.raises(OpError, match="choose from fast, cuda, torch"):
        op.choose(CPU)


def test_reasons_are_given():
    assert Op("demo", (NEVER, PLAIN)).explain(CPU) == [("cuda", False, "needs a GPU"), ("torch", True, "first supported")]
