"""C structs and kernel parameters as Python packs them."""

from __future__ import annotations

import struct


class Layout(struct.Struct):
    """A struct of a .cu file.

    Args:
        name: of the struct.
        fields: "<code of the struct module> <member>" of each, in order, separated by commas.
    """

    def __init__(self, name: str, fields: str):
        self.name = name
        self.members = [tuple(field.split()) for field in fields.split(",")]
        codes = "".join(code for code, _ in self.members)
        widest = max("iqP", key=lambda code: (code in codes, struct.calcsize(code)))
        super().__init__(f"{codes}0{widest}")  # padded at the end, as in an array of structs

    def offsets(self) -> dict[str, int]:
        """Offset of each member, in bytes."""
        places, codes = {}, ""
        for code, member in self.members:
            codes += code
            places[member] = struct.calcsize(codes) - struct.calcsize(code)
        return places


# single parameters; COUNT is the head of a table whose entries hold pointers
POINTER, INT, LONG, COUNT = (struct.Struct(code) for code in ("P", "i", "q", "i4x"))
