"""Components that play, score and train the tasks of a run, in this thread or as Ray actors.

Ray is imported only when it is used, so the package works without it. In an actor's process this
package is imported first, and imports the parts of roles as quickly as the driver did.
"""

from torchrl_grpo.host.startup import import_as_in_driver

import_as_in_driver("torchrl_grpo.assembly.parts")
