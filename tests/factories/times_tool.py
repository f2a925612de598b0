"""A tool of the tests' environments, as source and as the schema that a template shows."""

TIMES = '''
    def times(self, a: int, b: int) -> int:
        """Multiplies two numbers.

        Args:
            a: The first number.
            b: The second number.
        """
        self.calls += 1
        return a * b
'''  # of a class whose objects count their calls
SCHEMA = {"type": "function", "function": {
    "name": "times", "description": "Multiplies two numbers.", "parameters": {
        "type": "object", "properties": {"a": {"type": "integer", "description": "The first number."},
                                         "b": {"type": "integer", "description": "The second number."}},
        "required": ["a", "b"]}, "return": {"type": "integer"}}}
