"""Plain English words that generated tasks are written with, all different from each other."""

from collections.abc import Iterator

import numpy as np

_DESCRIBING = """
able amber ancient angry aqua autumn bitter blue bold brave brief bright brisk broad bronze calm careful charming
clean clear clever cloudy cold coral cosy crimson crisp curious damp daring dark deep dense distant dizzy dry dusty
eager early eastern elder elegant empty even faint fair famous fancy fast fierce fine firm flat fluffy fond formal
fresh friendly frosty gentle giant glad golden grand grave green grey happy harsh hazy heavy hidden hollow honest huge
humble idle inner ivory jolly keen kind lame late lazy light little lively lone long loud loyal lucky lush mellow
merry mild misty modest narrow neat nimble noble northern odd orange outer pale patient plain polite proud purple
quick quiet rapid rare red rich ripe rosy rough round royal rustic sandy scarlet secret sharp shiny short shy silent
silver simple sleepy slim slow small smart smooth snowy soft solemn sour southern spare speedy spicy stark steady
steep still stormy stout strange strict strong sturdy subtle sunny sweet swift tall tame tender thin tidy tiny
tough tranquil upper useful vague vast violet vivid warm wary western wet whole wide wild windy wise witty wooden
yellow young zealous
"""
_THINGS = """
acorn anchor anvil apple apron arrow badger bakery banner barley barn basin basket beacon beaver bell bench berry
bishop blanket bonnet border bottle boulder branch bridge broom bucket buckle butter button cabin camel candle canoe
canyon carpet castle cellar chapel cherry chimney cliff clock clover coach cobbler compass cottage cradle crane
cricket crown cupboard curtain daisy dancer desert dolphin donkey dragon drawer drum eagle engine falcon farmer
feather fence fiddle finch flask flute forest fossil fountain fox galley garden garlic gate glacier goblet goose grape
gravel guitar hammer harbour harp hazel hedge helmet heron hill hinge honey hornet hunter island ivy jacket jewel jug
juniper kettle kitten knight ladder lagoon lake lantern lemon lens lily linen lizard locket lumber magnet mantle maple
marble market meadow melon mill mirror mitten monk mountain mule museum needle nest oak oasis ocean olive onion
orchard otter oven owl paddle palace panther parrot pasture pear pebble pepper piano pigeon pillow pine pirate planet
plank plough pocket pond pony poppy porch potter prairie pulley quarry quilt rabbit raft raven ribbon river robin
rocket saddle sailor salmon satchel scarf school shepherd shield shovel sickle signal sketch spade sparrow spoon
squirrel stable statue stove stream sugar swan table tailor temple thimble thistle thunder tiger timber tower trumpet
tulip tunnel turnip turtle urchin valley vessel village violin wagon walnut walrus weaver whale wheel whistle willow
window wolf wool wren
"""

ADJECTIVES = tuple(_DESCRIBING.split())
"""Words that describe; none ends with another."""

NOUNS = tuple(_THINGS.split())
"""Words for things, none of which is among `ADJECTIVES`."""


def compound_words(rng: np.random.Generator) -> Iterator[str]:
    """All words such as "gentle-otter", each once, in random order; none is a part of another."""
    for code in rng.permutation(len(ADJECTIVES) * len(NOUNS)).tolist():
        yield f"{ADJECTIVES[code % len(ADJECTIVES)]}-{NOUNS[code // len(ADJECTIVES)]}"
