"""``python -m torchrl_grpo.migrate``: works for one more release, use ``python -m torchrl_grpo migrate``."""

from torchrl_grpo.extras.migrate.command import main

if __name__ == "__main__":
    main()
