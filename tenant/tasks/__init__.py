"""Many tasks over one base model: each row of a batch uses the adapter of its own task, and all rows share the base
model's products.

    tasks = Tasks(model)
    tasks.register("triage", "adapters/triage")       # a PEFT folder, or a PEFT configuration to train
    with tasks.batch(["triage", "billing", "triage"]):
        model(**three_rows)

The idea is that of PetS (Zhou et al., USENIX ATC 2022). Read in this order:

registry   `Tasks`: register, load, unload, save; at most `memory_limit` bytes of adapters
adapter    checks a task's name and folder, and makes its PEFT layers without changing the model
batch      maps rows to tasks, and computes them at each layer of the model
operators  computes the adapters of many tasks with batched products
row_blocks  local functions of rows, with the same bits for a row in every batch
twins      loads an adapter as a copy of a loaded one with the same configuration
coordinated  divides queued requests into batches, by measured costs
methods    PEFT methods of this package, and PEFT's methods that need base weights
"""

from tenant.tasks.registry import TaskInfo, Tasks

__all__ = ["TaskInfo", "Tasks"]
