"""Scheduling: which worker plays, scores or gets weights next, in this thread or as Ray actors on
the devices of their roles.

Ray is imported only when it is used, so the package works without it. In an actor's process this
package is imported first, before the objects that the actor is made from. So here, and only if the
driver did the same, they are imported without what they do not use.
"""

from torchrl_grpo.host.startup import import_as_in_driver

import_as_in_driver("torchrl_grpo.assembly.roles")
