"""``python -m weft`` is the ``weft`` command: what torchrun's ``-m`` starts."""

from weft.cli.main import main

if __name__ == "__main__":
    main()
