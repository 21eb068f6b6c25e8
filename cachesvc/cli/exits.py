"""The exit code of an error: 2 if the command line is wrong, else 1."""


def exit_code(error: Exception) -> int:
    """2 for an unknown option or an invalid value of one, also where the server finds it."""
    from billing.errors import InvalidAmount, InvalidLimit, InvalidName, InvalidSpan
    from cachesvc.config.errors import WrongOption
    from cachesvc.server.server_file import ServerFoundWrong

    values = (InvalidAmount, InvalidLimit, InvalidName, InvalidSpan)
    return 2 if isinstance(error, (WrongOption, ServerFoundWrong, *values)) else 1
