"""What every tool raises."""


class ToolError(Exception):
    """What a tool was asked for cannot be done; the message is all that the user sees."""
