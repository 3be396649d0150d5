"""``python -m torchrl_grpo.plan``: works for one more release, use ``python -m torchrl_grpo plan``."""

from torchrl_grpo.extras.plan.command import main

if __name__ == "__main__":
    main()
