"""The bytes of one token, which may be a part of a character.

Vocabularies spell them in two ways. In byte-level ones each byte is a character of its own; others have tokens such as
`<0xE2>` for bytes, and plain text otherwise.
"""

import re

BYTE_PIECE = re.compile("<0x([0-9A-F]{2})>")
BROKEN = "\ufffd"


def _byte_characters() -> dict[str, int]:
    """Return the byte that each character of a byte-level vocabulary stands for: bytes that show as a character stand for
    themselves, and the others follow from U+0100 on."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(0x100 + place): byte for place, byte in enumerate(others)}


BYTE_OF = _byte_characters()


def token_bytes(piece: str, text: str) -> bytes:
    """Return the bytes of a token. `piece`: as its vocabulary spells it. `text`: as it decodes between others."""
    if BROKEN not in text:
        return text.encode()
    if found := BYTE_PIECE.fullmatch(piece):
        return bytes([int(found[1], 16)])
    if all(character in BYTE_OF for character in piece):
        return bytes(BYTE_OF[character] for character in piece)
    return text.encode()
