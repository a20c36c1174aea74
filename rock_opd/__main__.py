from rock_opd.cli import main

if __name__ == "__main__":
    main()
