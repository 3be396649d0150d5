"""``python -m torchrl_grpo.view``: works for one more release, use ``python -m torchrl_grpo view``."""

from torchrl_grpo.extras.view.command import main

if __name__ == "__main__":
    main()
