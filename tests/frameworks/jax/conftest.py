"""Programs here run for milliseconds and take seconds to compile: XLA is asked to spend less on it."""

import os

# Before JAX is first used: it reads them then.
_QUICK = "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_QUICK}".strip()
