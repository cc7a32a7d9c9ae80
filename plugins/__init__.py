"""The methods that ship with the library. Each registers through the same hook as a third party's."""
