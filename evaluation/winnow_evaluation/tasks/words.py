"""Word lists that the tasks and their filler text are made of."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import cache

NOUNS = tuple(
    """
    acorn actor address airport almond anchor animal answer ankle apple apron archer armor arrow artist attic autumn
    baker balcony ballad banana bandage banker banner barber barley barn barrel basin basket battery beach beacon
    beaver bedroom beetle bell belt bench berry bicycle blanket blossom boat book boot border bottle boulder bowl
    branch bread breeze brick bridge broom brother brush bucket builder bulb bullet butcher butter button cabbage
    cabin cabinet cable cactus cake calendar camel camera candle cannon canoe canvas canyon captain caravan cargo
    carpet carrot cart carver castle catalog cathedral cattle cavern cellar chain chair chamber channel chapel
    chapter charcoal chariot cheese cherry chest chicken chimney chisel church cider circle clay cliff cloak clock
    closet cloth cloud clover coach coal coast cobbler coffee collar colony comet compass copper coral corner
    cottage cotton counter courier cousin cradle crane crater crayon creek cricket crown crystal cupboard curtain
    cushion customer dagger dairy daisy dancer dawn desert desk diamond diary dinner doctor dolphin donkey door
    dragon drawer dream driver drum duck eagle easel editor elbow elephant ember engine engineer envelope evening
    factory falcon farmer feather fence fern ferry festival fiddle field finger fireplace fisher flag flame flask
    flower flute forest forge fork fort fountain fox frame friend frost fruit furnace galaxy gallery garden garlic
    garment gate gazelle giant ginger giraffe glacier glass globe glove goat goblet grain granite grape grass gravel
    guard guest guitar hallway hammer hammock harbor harvest hatchet hawk hazel heater hedge helmet herald heron
    highway hill honey hood hook horizon horse hospital hotel hour house hunter iceberg idea insect island ivory
    jacket jaguar jar jasmine jewel journal journey judge juggler jungle kettle key kingdom kitchen kite kitten
    knight ladder lady lagoon lake lamp lantern lark lawyer leather lemon letter library lighthouse lily linen lion
    lizard lobster locket lodge lumber magnet mailbox mango mansion maple marble margin market mason meadow medal
    melody merchant meteor midnight mill miner mirror mitten monastery monkey moon morning mosaic mountain mouse
    museum mushroom musician napkin needle neighbor nest notebook novel nurse oak oasis ocean office olive onion
    orange orchard orchid otter oven owl oyster package paddle painter palace palm panther paper parade parcel
    parrot pasture path peach peacock pearl pebble pelican pencil penguin pepper piano picnic pigeon pillow pilot
    pine pioneer pirate planet plank plaster plate platform plow plum pocket poet pond pony poplar portrait postcard
    potato potter prairie prince prison puzzle pyramid quarry queen quilt rabbit raccoon radish raft railway rainbow
    raven recipe reef ribbon rifle river road robin rocket roof rooster rope rose ruby runner saddle sailor salad
    sandal scarf scholar school scooter sculptor seagull season shadow shark shepherd shield ship shirt shore shovel
    singer sister skater sketch sled slipper snail soldier sparrow spear spider spoon spring squirrel stable stadium
    staircase star statue stone storm story stove stranger stream street student summer sunset swan sword table
    tailor tavern teacher teapot temple tent theater thimble thistle thread throne thunder tiger timber toast tomato
    torch tower town tractor trader trail train traveler treasure tree trumpet tulip tunnel turkey turtle valley
    vase vessel village vineyard violet violin visitor volcano wagon waiter walnut walrus warden watch water weaver
    whale wheat wheel whistle widow willow window winter wizard workshop writer yard zebra
    """.split()
)

ADJECTIVES = tuple(
    """
    able absent ample amber ancient angry anxious aqua arctic autumnal awake awkward bare bitter black bland blank
    blue bold brave brief bright brisk broad broken bronze brown busy calm careful casual cautious central charming
    cheap cheerful chief chilly civil clean clear clever clumsy coarse cold common complex concrete constant cool
    costly cozy crimson crisp crooked cruel curious curly current daily damp daring dark dear deep delicate dense
    dim distant dizzy double drowsy dry dull dusty eager early eastern easy elder elegant empty enormous equal even
    evil exact exotic fading faint fair faithful false famous fancy fast feeble fertile festive fierce final fine
    firm fixed flat foggy fond foreign formal fragile frank free fresh frozen fuzzy gentle genuine glad gleaming
    global gloomy golden good graceful grand grateful gray great green grim handsome handy happy harsh hasty heavy
    helpful hidden high hollow honest hot huge humble hungry icy ideal idle inner jagged jolly joyful keen kind
    large lasting late lavish lazy lean light little lively local lonely long loose loud lovely loyal lucky lunar
    mad magenta major marine mellow merry mighty mild minor misty modern modest moist muddy narrow native naval near
    neat nervous new nimble noble noisy northern novel odd old opal open orderly outer pale patient plain playful
    pleasant polite poor precise pretty primary private proud public pure purple quaint quick quiet rapid rare raw
    ready rear red regal remote rich rigid ripe robust rough round royal rural rusty sacred sad safe salty scarlet
    secret senior sharp shiny short shy silent silver simple sleepy slender slow small smooth snowy sober soft solar
    solid sour southern spare special steady steep sticky stiff still stormy strange strict strong sturdy subtle
    sudden sunny superb sweet swift tall tame tender thick thin thirsty tidy tiny tired tough tropical true upper
    urban useful vacant vague vast velvet violet vital vivid warm wary weary western white whole wide wild windy
    wise witty wooden young zealous
    """.split()
)

VERBS = tuple(
    """
    accept admire adopt allow announce answer appoint arrange ask assemble attach avoid borrow brush calm carry
    celebrate chase clean climb collect compare complete consider cook cover cross deliver describe design destroy
    discover discuss divide doubt enjoy enter examine explain explore fasten fetch finish follow gather greet guard
    guess guide happen heat help hunt imagine improve inspect invent invite join kick knock label launch learn lift
    listen load lock love mark measure mend mention miss move notice observe obey offer open order paint pass pick
    plant play polish praise prepare present preserve print protect pull push question raise reach recall receive
    record remember remove repair repeat report rescue respect return reveal roast save search select serve settle
    share sharpen shout signal sketch smell sort start store study support surprise talk taste tend thank touch
    trace trade train travel treat trust turn unite use visit wait walk want warn wash watch water welcome whisper
    wish wonder
    """.split()
)

ADVERBS = tuple(
    """
    again almost already always barely briefly calmly carefully early eagerly easily finally gently gladly happily
    hardly later loudly merely nearly never often once patiently perhaps politely proudly quickly quietly rarely
    sadly slowly softly sometimes soon suddenly usually warmly
    """.split()
)

NAMES = tuple(
    """
    Ada Amir Anna Boris Carla Chen Clara Dana David Elena Emil Eva Farid Felix Fiona Grace Hanna Henry Hugo Ida Igor
    Ines Ivan Jana Jonas Julia Karim Klara Leo Lena Lucas Mara Marco Maya Mila Nadia Nina Noah Olga Omar Oscar Paula
    Peter Rosa Ruth Samir Sara Simon Sofia Tara Theo Tomas Vera Victor Wanda Yara Yusuf Zoe
    """.split()
)


def past_tense(verb: str) -> str:
    """The past tense of one of ``VERBS``, all of which are regular."""
    if verb.endswith("e"):
        return verb + "d"
    if verb.endswith("y") and verb[-2] not in "aeiou":
        return verb[:-1] + "ied"
    return verb + "ed"


def plural(noun: str) -> str:
    """The plural of one of ``NOUNS`` by the regular rules of spelling."""
    if noun.endswith(("s", "sh", "ch", "x", "z")):
        return noun + "es"
    if noun.endswith("y") and noun[-2] not in "aeiou":
        return noun[:-1] + "ies"
    return noun + "s"


def participle(verb: str) -> str:
    """The present participle of one of ``VERBS``."""
    return verb[:-1] + "ing" if verb.endswith("e") and not verb.endswith("ee") else verb + "ing"


@cache
def vocabulary() -> tuple[str, ...]:
    """Every distinct word and inflected form, sorted: what the word-extraction tasks draw their lists from."""
    words = {*NOUNS, *ADJECTIVES, *VERBS, *ADVERBS}
    words |= {plural(noun) for noun in NOUNS}
    words |= {form(verb) for verb in VERBS for form in (past_tense, participle)}
    return tuple(sorted(words))


def compound_words(rng: random.Random, count: int) -> list[str]:
    """``count`` distinct words: plain ones as far as the vocabulary goes, then compounds of two nouns."""
    words = vocabulary()
    if count <= len(words):
        return rng.sample(words, count)
    chosen = dict.fromkeys(rng.sample(words, len(words)))
    while len(chosen) < count:
        chosen[rng.choice(NOUNS) + rng.choice(NOUNS)] = None
    return list(chosen)


def distinct(draw: Callable[[], str], count: int) -> list[str]:
    """Draw until there are ``count`` that differ; in the order of their first."""
    drawn: dict[str, None] = {}
    while len(drawn) < count:
        drawn[draw()] = None
    return list(drawn)


def inserted(parts: Sequence[str], places: Sequence[int], inserts: Sequence[str]) -> list[str]:
    """``parts`` with each of ``inserts`` before the part at its place; places ascend."""
    result = list(parts)
    for place, insert in reversed(list(zip(places, inserts, strict=True))):
        result.insert(place, insert)
    return result
