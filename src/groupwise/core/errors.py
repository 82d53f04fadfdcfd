"""The one exception that means "the user can fix this": shown as a paragraph, never as a traceback."""


class UserError(ValueError):
    """A value that cannot be used: the message holds the value, the rule and the remedy."""
