"""The error for bad input: what was wrong, with the numbers."""


class InputError(ValueError):
    """A public function was given input outside its contract."""


def require(condition: bool, message: str) -> None:
    """Raise ``InputError(message)`` unless ``condition`` holds."""
    if not condition:
        raise InputError(message)
