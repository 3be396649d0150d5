"""Who does what next in a run: rollout tasks, staleness, and workers in this thread or in Ray actors.
Ray is imported inside functions, so runs in one thread need no Ray.
"""

from torchrl_grpo.host.startup import import_as_in_driver

import_as_in_driver("torchrl_grpo.assembly.parts")
