"""The one exception that a user can mend."""


class UserError(Exception):
    """A fault in the recipe, the data, the weights or the disk. Its text is one line (or one line per fault).

    It names the file and the key or value, says what is wrong and what to do. The command line prints it without a
    traceback and ends with exit status 2.
    """
