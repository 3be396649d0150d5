"""``python -m torchrl_grpo.export``: works for one more release, use ``python -m torchrl_grpo export``."""

from torchrl_grpo.extras.export.command import main

if __name__ == "__main__":
    main()
