"""The words that name a needle.

Every word is one token of the embedded model's tokenizer when a space stands
before it, so that a key is always two tokens.
"""

_ADJECTIVES = """
amber ancient bitter bold brave bright broken calm clever cold cool crisp
curly damp dark deep dry dusty eager early faint fair fancy fresh gentle
giant golden grand gray green happy heavy hidden hollow humble icy jolly
kind large late lively lone loud lucky merry mild misty modern narrow neat
noble pale plain proud purple quick quiet rapid rough royal shy silent
small tall
"""

_NOUNS = """
anchor apple arrow badge barn basket bell bird boat bottle bridge brook
candle canyon castle cloud clover coin comet crane desert dragon drum eagle
falcon feather fern field flame forest fox garden glacier harbor hawk hill
island kettle lake lantern lemon lion maple meadow mirror moon mountain
ocean olive orchard otter owl pearl pebble piano pine planet river rocket
saddle shadow ship silver spider
"""

ADJECTIVES: tuple[str, ...] = tuple(_ADJECTIVES.split())
"""The first words of a key."""

NOUNS: tuple[str, ...] = tuple(_NOUNS.split())
"""The second words of a key."""

Key = tuple[str, str]
"""An adjective and a noun."""
