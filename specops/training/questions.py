"""Questions put together from sentence patterns and subjects: user turns as people write them.

A small target's own user turns, sampled at a temperature, wander; a head that has only seen those guesses worse on plain
questions. These are plain, many, and a function of the seed. They are here to vary what the target answers, not to be
looked up: a subject that an evaluation asks about must not be among them (a test holds the examples' prompts to that).
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import islice

_KNOWLEDGE = """
volcanoes; black holes; quantum computers; bees; the stock market; the printing press; solar panels; the human heart;
penguins; plate tectonics; the moon landing; electric cars; antibiotics; coral reefs; the immune system; tides;
earthquakes; inflation; democracy; the Roman Empire; the Silk Road; the French Revolution; the Industrial Revolution; the
Renaissance; ancient Egypt; the Cold War; the internet; encryption; blockchain; neural networks; operating systems;
databases; cloud computing; radio waves; magnetism; nuclear fusion; the periodic table; acids and bases; DNA; evolution;
natural selection; cell division; enzymes; the nervous system; the digestive system; the lungs; muscles; bones; memory;
dreams; stress; habits; motivation; empathy; the scientific method; probability; prime numbers; fractions; algebra;
calculus; geometry; statistics; logic; game theory; opportunity cost; compound interest; taxes; insurance; globalization;
unemployment; marketing; branding; entrepreneurship; leadership; teamwork; negotiation; public speaking; time management;
critical thinking; creativity; mindfulness; nutrition; protein; vitamins; hydration; yoga; running; swimming; soccer;
basketball; chess; jazz; classical music; impressionism; photography; architecture; poetry; Shakespeare; mythology; Greek
gods; Buddhism; stoicism; utilitarianism; existentialism; human rights; the United Nations; the Supreme Court; elections;
journalism; social media; privacy; recycling; deforestation; renewable energy; wind turbines; hurricanes; deserts;
rainforests; glaciers; rivers; the ozone layer; biodiversity; whales; sharks; elephants; wolves; dolphins; spiders;
butterflies; dinosaurs; fossils; mushrooms; orchids; coffee; chocolate; cheese; bread; olive oil; tea; spices; steam
engines; airplanes; submarines; satellites; telescopes; microscopes; lasers; batteries; semiconductors; 3D printing;
robotics; virtual reality; search engines; open source software; version control; unit testing
"""
_PROCESSES = """
bake bread at home; change a flat tire; start a vegetable garden; write a cover letter; prepare for a job interview; save
money; make a budget; learn to draw; train a puppy; clean a cast iron pan; fix a leaking faucet; paint a bedroom; remove a
coffee stain; grow tomatoes; brew good coffee; cook rice; make pancakes; roast a chicken; make a salad dressing; build a
bookshelf; write a resume; give a presentation; study for an exam; take better notes; read more books; wake up earlier;
stop procrastinating; lower my stress; make new friends; apologize to a friend; ask for a raise; start a small business;
write a blog post; build a website; learn to program; set a strong password; back up my photos; speed up my computer;
choose a laptop; plan a birthday party; pack a suitcase; travel on a budget; learn to swim; run my first five kilometers;
stretch before running; start meditating; improve my handwriting; memorize vocabulary; write a short speech; give useful
feedback; lead a meeting; resolve a conflict at work; teach a child to read; care for a cactus; compost kitchen waste;
sharpen a knife; sew a button; iron a shirt; wash wool; store potatoes; freeze vegetables; make lemonade; make pizza
dough; play the piano; sing in tune; take a good photo; edit a video; start a podcast; write a haiku; write a business
plan; register a company; file my taxes
"""
_THINGS = """
a lonely dragon; a lost key; an old clockmaker; a talking tree; a girl who can hear colors; a forgotten library; a brave
mouse; a pirate who fears water; a city under the sea; a magic pencil; two rival bakers; a time traveler; an astronaut on
Mars; a stray dog; a village without sound; a wizard who lost his memory; the last train of the night; a secret garden; a
snow storm; a musician in the rain; a detective and a missing painting; a letter that came too late; a small island; a
broken promise; a boy and his kite; a fox in winter; the ocean at night; a mountain village; an unexpected guest; a kind
giant; a mirror; a grandmother's recipe; the first day of school; a candle; a rainy afternoon; friendship; courage;
spring; the desert; the stars; a football match; an honest thief; a sleepy bear; a sailor coming home; a very slow race; a
market at dawn; hope; an empty house
"""
_CODE = """
reverses a string; counts the vowels in a text; returns the largest number in a list; removes duplicates from a list;
computes the factorial of a number; checks whether a number is prime; merges two sorted lists; finds the longest word in a
text; converts Celsius to Fahrenheit; computes the average of a list; counts words in a file; flattens a nested list;
finds the second largest number; checks whether two words are anagrams; generates Fibonacci numbers; rotates a list;
validates an email address; reads a CSV file; groups words by their first letter; finds the intersection of two lists;
capitalizes every word; computes a running sum; finds missing numbers; transposes a matrix; counts the bits of an integer;
converts a number to binary; checks balanced parentheses; implements a stack; implements a queue; implements binary
search; rolls two dice; picks a random element; formats a date; parses a JSON string; computes the greatest common
divisor; lists all files in a folder; downloads a web page; measures how long a function takes; retries a failed call;
caches results
"""
_LANGUAGES = "Python; Java; C; C++; Go; Ruby; Rust; TypeScript; Kotlin; Swift"
_PAIRS = """
a crocodile and an alligator; weather and climate; a comet and an asteroid; a simile and a metaphor; mass and weight; an
ape and a monkey; a stack and a queue; a list and a tuple; TCP and UDP; a compiler and an interpreter; threads and
processes; fiction and nonfiction; a novel and a novella; jam and jelly; baking and roasting; a credit card and a debit
card; stocks and bonds; a republic and a monarchy; speed and velocity; heat and temperature; a fruit and a vegetable; a
frog and a toad; a moth and a butterfly; arteries and veins; mitosis and meiosis; RNA and DNA; AC and DC current; an inlet
and a bay; a hill and a mountain; jazz and blues; a violin and a viola; tea and coffee; cats and dogs as pets; city life
and country life; reading and listening to books; trains and planes; working at home and in an office; running and
cycling; a laptop and a tablet; email and letters; saving and investing; coal and gas; butter and margarine
"""
_PEOPLE = """
Albert Einstein; Isaac Newton; Ada Lovelace; Leonardo da Vinci; Cleopatra; Nelson Mandela; Charles Darwin; Galileo
Galilei; Jane Austen; Mozart; Vincent van Gogh; Frida Kahlo; Martin Luther King; Florence Nightingale; Alan Turing; Nikola
Tesla; Amelia Earhart; Mahatma Gandhi; Napoleon; Julius Caesar; Socrates; Plato; Aristotle; Confucius; Queen Victoria;
Joan of Arc; Abraham Lincoln; George Washington; Winston Churchill; Rosa Parks; Neil Armstrong; Grace Hopper; Ludwig van
Beethoven; Homer
"""
_PLACES = """
Paris; Tokyo; New York; London; Cairo; Berlin; Madrid; Istanbul; Rio de Janeiro; Cape Town; Bangkok; Lisbon;
Vienna; Prague; Athens; Seoul; Mexico City; Montreal; San Francisco; Amsterdam; Dublin; Barcelona; Venice; Kyoto;
Singapore; Nairobi
"""
_COUNTRIES = "France; Japan; Brazil; Canada; Egypt; Kenya; India; Mexico; Norway; Spain; Peru; Turkey; Poland; Vietnam"
_FOREIGN = "German; Spanish; Italian; Portuguese; Dutch; Japanese; Swedish"
_SENTENCES = """
Where is the nearest train station?; I would like a cup of tea.; The weather is nice today.; My brother lives in a big
house.; Thank you for your help.; We are going to the beach tomorrow.; She has been working here for ten years.; Please
call me later.; The book on the table is mine.; I don't know what you mean.; He forgot to send the report.; Can we move
the meeting to Friday?; The food was cold and the waiter was rude.; This is not what I ordered.; They won because they
trained harder.; I think the plan might work.; Nobody told me about the change.; The car makes a strange noise.; We need
more time to finish.
"""
_RECIPIENTS = """
my boss about a day off; a teacher about a late assignment; a client about a delay; a friend I have not seen for years;
the support team about a wrong invoice; my neighbor about loud music; a company about an internship; a hotel about a
reservation; my team about a new project; a colleague who helped me; the school about my child's absence; a shop about a
refund
"""
_GROUPS = """
students; beginners; busy parents; new managers; older people; children; travelers; freelancers; a small team; a shy
person
"""
_NAMED = """
a coffee shop; a travel blog; a fitness app; a dog; a cat; a fantasy kingdom; a book club; a science podcast; a toy store;
a board game; a jazz band; a flower shop; a robot; a spaceship; a school newspaper; a hiking club; a cooking channel
"""
_PLANS = """
a trip to the mountains; a healthy week of dinners; a month of learning to code; a small wedding; a garden party; a moving
day; a week without sugar; a family reunion; a science fair project; a home workout; a school play; a fundraiser; a spring
cleaning
"""
_PASSAGES = """
The old bridge was closed for repairs in March. Since then, drivers take the road along the river, which is longer but
quieter.; Many people drink coffee in the morning. It helps them wake up, but too much of it can make them nervous and
tired later on.; The museum opens at nine and closes at five. On Mondays it is closed. Children under twelve do not pay
for a ticket.; Our company grew quickly last year. Sales doubled, and we hired forty people, but costs rose as well and
profit stayed flat.; Honey bees live in large groups. One queen lays the eggs, and thousands of workers gather nectar and
look after the young.; The storm reached the coast on Friday night. Trees fell, some roofs were damaged, and the power was
out for several hours.
"""
# Patterns, and what each of them is filled with.
_PATTERNS = tuple(
    (tuple(" ".join(patterns.split()).split(" | ")), subjects)
    for patterns, subjects in (
        (
            """
            What is the history of {}? | What are the most important facts about {}? | Tell me about {}. | Explain {} in
            simple terms. | Explain {} to a child. | Can you explain {}? | Why is {} important? | Give a short
            introduction to {}. | Write a short essay about {}. | Write three paragraphs about {}. | What should everyone
            know about {}? | Give me five interesting facts about {}. | What are common misconceptions about {}? |
            Summarize what is known about {}. | Write a quiz with three questions about {}. | I have to give a talk about
            {}. Where do I start? | What is {}? | How would you describe {} to somebody who has never heard of it? | List
            the advantages and disadvantages of {}. | What are some good questions to ask about {}? | Tell me a joke about
            {}. | Define {}.
            """,
            _KNOWLEDGE,
        ),
        (
            """
            How do I {}? | What is the best way to {}? | Give me step by step instructions to {}. | I want to {}. Any
            advice? | What do I need to {}? | Give me five tips to {}. | What mistakes should I avoid when I {}? | Can you
            help me {}? | Write a short guide: how to {}. | How long does it take to {}?
            """,
            _PROCESSES,
        ),
        (
            """
            Write a short story about {}. | Write a poem about {}. | Tell me a story about {}. | Write a haiku about {}. |
            Describe {} in one paragraph. | Write the opening of a novel about {}. | Write a bedtime story about {}. |
            Give me three story ideas about {}. | Write a song about {}. | Write a dialogue in a story about {}.
            """,
            _THINGS,
        ),
        (
            """
            Write a Python function that {}. | Write a program that {}. | How do I write a function that {}? | Show me
            Python code that {}, and explain it. | Write a small script that {}. | Write tests for a function that {}.
            """,
            _CODE,
        ),
        (
            """
            What is {} good for? | How do I read a file in {}? | How do I loop over a list in {}? | What are the main
            features of {}? | Write 'Hello, world' in {}. | How are errors handled in {}? | How do I sort a list of names
            in {}?
            """,
            _LANGUAGES,
        ),
        (
            """
            What is the difference between {}? | Compare {}. | Compare and contrast {}. | Explain the difference between
            {} with an example. | Which is better, and why: {}?
            """,
            _PAIRS,
        ),
        (
            """
            Who was {}? | What is {} known for? | Tell me about the life of {}. | Write a short biography of {}. | When
            did {} live? | What can we learn from {}? | Write an imaginary interview with {}.
            """,
            _PEOPLE,
        ),
        (
            """
            What should I see in {}? | Plan a weekend in {}. | Describe {} to a visitor. | What food should I try in {}? |
            Write a postcard from {}. | What is the best time of the year to visit {}?
            """,
            _PLACES,
        ),
        (
            """
            What is the capital of {}? | Tell me about the culture of {}. | What are traditional dishes of {}? | Where is
            {}? | List five facts about {}. | What languages are spoken in {}?
            """,
            _COUNTRIES,
        ),
        (
            """
            Rewrite this sentence in other words: {} | Make this sentence more polite: {} | Correct this sentence if
            needed: {} | Write three sentences that could follow this one: {} | Turn this into a question: {} | What is
            the tone of this sentence? {}
            """,
            _SENTENCES,
        ),
        (
            """
            Write an email to {}. | Write a polite letter to {}. | Write a short message to {}. | Draft an email to {}, in
            a friendly tone.
            """,
            _RECIPIENTS,
        ),
        (
            """
            Suggest five hobbies for {}. | Give me a daily routine for {}. | What books would you recommend for {}? |
            Write a list of goals for {}. | What gifts are good for {}? | Suggest a game for {}. | What advice would you
            give {}?
            """,
            _GROUPS,
        ),
        (
            """
            Give me five names for {}. | Write a slogan for {}. | Write an advertisement for {}. | Describe the perfect
            name for {}.
            """,
            _NAMED,
        ),
        (
            """
            Make a plan for {}. | Create a checklist for {}. | What do I have to think of for {}? | Write a schedule for
            {}.
            """,
            _PLANS,
        ),
        (
            """
            Summarize the following text: {} | What is the main point of this text? {} | Write a title for this text: {} |
            Continue this text: {} | Rewrite this text for a child: {}
            """,
            _PASSAGES,
        ),
    )
)
_SUMS = (
    "What is {a} times {b}?",
    "What is {a} plus {c}?",
    "If I buy {b} apples for {b} cents each and {a} pears for 30 cents each, what do I pay?",
    "A shop sells {a} books a day. How many does it sell in {b} days?",
    "I have {c} dollars and spend {a}. How much is left?",
    "Divide {c} by {b} and explain each step.",
    "A car drives {c} kilometers in {b} hours. How fast is it on average?",
    "What is {a} percent of {c}?",
    "A recipe for {b} people needs {c} grams of flour. How much do I need for {a} people?",
    "Anna is {a} years old and her brother is {b} years younger. How old is he?",
)


# What people put around a question. The target answers each form in its own words.
_BEFORE = ("Hello! ", "Hi, ", "Please help me. ", "Quick question: ", "I am curious. ", "For my class: ", "Thanks. Now: ")
_BEHIND = (
    " Keep it short.", " Please be detailed.", " Use bullet points.", " Give an example.", " I am a beginner.",
    " Explain your reasoning.", " It is for my homework.", " Answer in one paragraph.", " Use simple words.", " Thank you!",
    " Make it fun.", " Answer in one sentence.", " I have little time.", " Add a short conclusion.", " Number the steps.",
)  # fmt: skip


def _split(text: str) -> list[str]:
    return [part for part in map(str.strip, " ".join(text.split()).split(";")) if part]


def subjects() -> list[str]:
    """Everything the patterns are filled with."""
    return [subject for _, source in _PATTERNS for subject in _split(source)] + _split(_FOREIGN)


def questions(count: int, seed: int) -> list[str]:
    """``count`` different questions, the same for the same seed.

    Raises:
        ValueError: more than can be put together.
    """
    picked: dict[str, None] = {}
    for question in islice(_drawn(random.Random(seed)), 50 * count + 1000):
        picked[question] = None
        if len(picked) == count:
            return list(picked)
    raise ValueError(f"{count} different questions can't be put together, only some {len(picked)}; ask for fewer at a time")


def _drawn(draw: random.Random) -> Iterator[str]:
    filled = [(pattern, _split(source)) for patterns, source in _PATTERNS for pattern in patterns]
    # A pattern's share of the questions grows with what it can be filled with, but slowly: all kinds are to be met.
    weights = [len(each) ** 0.5 for _, each in filled]
    sentences, languages = _split(_SENTENCES), _split(_FOREIGN)
    while True:
        kind = draw.random()
        if kind < 0.05:
            question = draw.choice(_SUMS).format(a=draw.randint(2, 40), b=draw.randint(2, 12), c=draw.randint(50, 500))
        elif kind < 0.08:
            question = f"Translate into {draw.choice(languages)}: {draw.choice(sentences)}"
        else:
            pattern, each = draw.choices(filled, weights)[0]
            question = pattern.format(draw.choice(each))
        before = draw.choice(_BEFORE) if draw.random() < 0.2 else ""
        behind = draw.choice(_BEHIND) if draw.random() < 0.4 else ""
        yield before + question + behind
