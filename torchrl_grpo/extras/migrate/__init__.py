"""Migration: configs of TRL, verl, AReaL, prime-rl and TorchRL's GRPO script in terms of ours.

``readers`` and ``scripts`` make flat settings of a file, the ``.toml`` files say what each key is
here, ``translation`` and ``sizes`` apply them, and ``__main__`` prints. Nothing of a file is run.
"""
