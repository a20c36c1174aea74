from rock_opd.cli import main

if __name__ == "__main__":
    try:
        main()
    finally:
        # An interrupt that passed through an exec'd string (every dataclass is one, so most imports
        # are) leaves a mark in CPython, caught or not: `python -m` would end as killed by SIGINT,
        # whatever the status. The next string clears it.
        exec("")
