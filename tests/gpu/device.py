"""The kind of accelerator that the tests here run on. Without one, a module that imports this is skipped."""

import os

import pytest
import torch

_STAND_IN = "MODELFLEET_STANDIN_TESTS" in os.environ
GPU = pytest.mark.gpu
KIND = "standin" if _STAND_IN else "cuda"
if not (_STAND_IN or torch.cuda.is_available()):
    pytest.skip("there is no CUDA device. On a machine that has one: make test-gpu", allow_module_level=True)
