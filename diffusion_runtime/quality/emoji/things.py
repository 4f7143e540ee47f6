"""The closed vocabulary of the `emoji` data: things, how each is called, how it moves, and which way it faces."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Thing:
    """One picture of Noto Color Emoji."""

    name: str
    glyph: str
    kind: str
    """What it does when it moves: one of KINDS."""
    faces: int
    """-1: its front is at the left, and it is mirrored when it moves to the right; 1: at the right; 0: neither."""
    synonyms: tuple[str, ...] = ()

    @property
    def words(self) -> tuple[str, ...]:
        """The name, then other names."""
        return (self.name, *self.synonyms)


KINDS = ("walker", "flyer", "swimmer", "car", "boat", "object")


def _things(kind: str, table: str) -> list[Thing]:
    """Lines of `glyph facing name, synonym, ...`; facing is <, > or =."""
    found = []
    for line in table.strip().splitlines():
        glyph, facing, names = line.strip().split(" ", 2)
        name, *synonyms = (part.strip() for part in names.split(","))
        found.append(Thing(name, glyph, kind, "<=>".index(facing) - 1, tuple(synonyms)))
    return found


THINGS: tuple[Thing, ...] = tuple(
    _things(
        "walker",
        """
        🐶 = dog, puppy
        🐱 = cat, kitten
        🐰 = rabbit, bunny
        🦊 = fox
        🐻 = bear
        🐼 = panda
        🐨 = koala
        🐅 < tiger
        🦁 = lion
        🐄 < cow
        🐖 < pig
        🐸 = frog
        🐵 = monkey
        🐎 < horse
        🦄 < unicorn
        🦓 < zebra
        🐘 < elephant
        🐪 < camel
        🦒 < giraffe
        🦘 < kangaroo
        🐑 < sheep, lamb
        🦌 < deer
        🦝 = raccoon
        🐿 < squirrel
        🦔 < hedgehog
        🐊 < crocodile, alligator
        🐢 < turtle, tortoise
        🐍 < snake
        🦕 < dinosaur
        🦖 < t rex, tyrannosaurus
        🐌 < snail
        🕷 = spider
        🐞 = ladybug, ladybird
        🐓 < rooster, chicken
        🐧 < penguin
        🐤 < chick
        🦩 < flamingo
        🦚 = peacock
        """,
    )
    + _things(
        "flyer",
        """
        🐦 < bird
        🦅 < eagle
        🦉 = owl
        🦜 < parrot
        🦇 = bat
        🐝 < bee
        🦋 = butterfly
        🐉 < dragon
        🚁 < helicopter
        ✈ > airplane, plane
        🚀 > rocket
        🛸 = flying saucer, ufo
        🎈 = balloon
        🪂 = parachute
        """,
    )
    + _things(
        "swimmer",
        """
        🐙 = octopus
        🦀 = crab
        🐠 < fish
        🐬 < dolphin
        🐳 < whale
        🦈 < shark
        🦆 < duck
        """,
    )
    + _things(
        "car",
        """
        🚗 < car
        🚕 < taxi, cab
        🚌 < bus
        🏎 < racing car, race car
        🚑 < ambulance
        🚒 < fire truck, fire engine
        🚜 < tractor
        🏍 < motorcycle, motorbike
        🚲 < bicycle, bike
        🚂 < train, locomotive
        """,
    )
    + _things(
        "boat",
        """
        ⛵ < sailboat, boat
        🚢 < ship
        """,
    )
    + _things(
        "object",
        """
        🍎 = apple
        🍐 = pear
        🍊 = orange
        🍋 = lemon
        🍌 = banana
        🍉 = watermelon
        🍇 = grape
        🍓 = strawberry
        🍒 = cherry
        🍍 = pineapple
        🥝 = kiwi
        🍆 = eggplant, aubergine
        🥑 = avocado
        🥦 = broccoli
        🌶 = chili pepper, chili
        🌽 = corn
        🥕 = carrot
        🥐 = croissant
        🍞 = bread
        🥨 = pretzel
        🧀 = cheese
        🍳 = fried egg, egg
        🥞 = pancake
        🌭 = hot dog
        🍔 = hamburger, burger
        🍟 = fries, french fries
        🍕 = pizza
        🌮 = taco
        🍦 = ice cream
        🍩 = donut, doughnut
        🍪 = cookie, biscuit
        🎂 = cake, birthday cake
        🧁 = cupcake, muffin
        🍭 = lollipop
        🍿 = popcorn
        ☕ = coffee, cup of coffee
        😀 = smiling face, happy face, smiley
        😎 = cool face, face with sunglasses
        😍 = face in love, face with heart eyes
        😡 = angry face
        😱 = scared face, screaming face
        🤠 = cowboy face, cowboy
        🤡 = clown
        🤖 = robot
        👻 = ghost
        👽 = alien
        💀 = skull
        🎃 = pumpkin
        👾 = monster
        ☀ = sun
        ⭐ = star
        🌙 = moon
        🌈 = rainbow
        ⚡ = lightning, lightning bolt
        ❄ = snowflake
        🔥 = fire, flame
        ⛄ = snowman
        🌍 = earth, globe
        🪐 = planet, saturn
        🌻 = sunflower
        🌷 = tulip
        🌹 = rose
        🍄 = mushroom
        ⚽ = soccer ball, football
        🏀 = basketball
        🎸 = guitar
        🎁 = gift, present
        🎩 = top hat, hat
        👑 = crown
        💎 = diamond, gem
        ⏰ = alarm clock, clock
        💡 = light bulb, bulb
        ☂ = umbrella
        ♥ = heart
        🏰 = castle
        """,
    )
)
THING_NAMES: tuple[str, ...] = tuple(thing.name for thing in THINGS)
