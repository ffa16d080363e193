"""Torch models in fleets. Exports the names of `adapter_protocol.Adapter`."""

from modelfleet.frameworks.batch_parts import inputs
from modelfleet.frameworks.torch import arrays, files, nodes
from modelfleet.frameworks.torch.building import (
    check_model,
    copy_model,
    fill,
    is_model,
    randomness,
    restore_randomness,
    seeding,
    stacked_weights,
    weights_key,
    without_callers_contexts,
)
from modelfleet.frameworks.torch.cpu.malloc import keeping_pages
from modelfleet.frameworks.torch.cpu.openmp import sharing_cores
from modelfleet.frameworks.torch.cutting import pieces
from modelfleet.frameworks.torch.devices import (
    accelerators,
    choose,
    hardware,
    memory,
    native,
    threads,
    use_threads,
)
from modelfleet.frameworks.torch.direct import DirectModels
from modelfleet.frameworks.torch.doctor_facts import accelerator_rows, cache_folder
from modelfleet.frameworks.torch.engine import make_engine
from modelfleet.frameworks.torch.family import family
from modelfleet.frameworks.torch.lessons import CLASS_AXIS
from modelfleet.frameworks.torch.likeness import signatures
from modelfleet.frameworks.torch.member_numbers import numbers_of, restore_numbers
from modelfleet.frameworks.torch.parallel.process_group import ProcessGroup
from modelfleet.frameworks.torch.recipe import compile, prepare
from modelfleet.frameworks.torch.replica import Replica, weight_bytes
from modelfleet.frameworks.torch.schedules import Schedules
from modelfleet.frameworks.torch.scoring import score
from modelfleet.frameworks.torch.settings import settings, using
from modelfleet.frameworks.torch.stamps import ModelStamp, ModelStamps
from modelfleet.frameworks.torch.structure import difference, signature, trained_twice
from modelfleet.frameworks.torch.task import PRECISIONS
from modelfleet.frameworks.torch.widths.family import shapes

NAME = "torch"
