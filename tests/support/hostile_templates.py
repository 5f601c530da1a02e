"""Chat templates that would take a renderer's time, memory or secrets; each names what it tries."""

DOUBLED = "{% set ns = namespace(x=START) %}{% for _ in range(200) %}{% set ns.x = STEP %}{% endfor %}"


def doubled(start: str, step: str, use: str) -> str:
    """A value that grows by a step two hundred times, and what is done with it."""
    return DOUBLED.replace("START", start).replace("STEP", step) + use


TWICE = doubled("[1]", "[ns.x, ns.x]", "USE")  # small in memory, endless for whoever walks through it
PAIRS = doubled("(1,)", "(ns.x, ns.x)", "USE")
DEEP = (  # as deep as the budget allows
    "{% set ns = namespace(x=()) %}{% for _ in range(6000) %}{% set ns.x = (ns.x,) %}{% endfor %}USE"
)
BIG = "{% set big = 'ab' * 100000 %}"
TURNS = "{% for i in range(99999) %}{% for j in range(99999) %}USE{% endfor %}{% endfor %}"

TOO_MUCH = {
    "loops in loops": TURNS.replace("USE", ""),
    "a loop's condition": "{% for i in range(99999) if range(99999) | select | list | length < 0 %}{% endfor %}",
    "a loop's cheap condition": "{% for a in range(9999) %}{% for b in range(9999) if false %}{% endfor %}{% endfor %}",
    "text of a loop": "{% for i in range(99999) %}" + "x" * 10_000 + "{% endfor %}",
    "text of a macro": "{% macro m() %}{% for i in range(9999) %}" + "x" * 9999 + "{% endfor %}{% endmacro %}{{ m() }}",
    "text of a set block": "{% set x %}{% for i in range(9999) %}" + "x" * 10_000 + "{% endfor %}{% endset %}",
    "recursive macro": "{% macro m(n) %}{{ m(n) }}{{ m(n) }}{% endmacro %}{{ m(1) }}",
    "macros that fan out": "{% macro a(n) %}{% if n %}{{ a(n - 1) }}{{ a(n - 1) }}{% endif %}{% endmacro %}{{ a(60) }}",
    "recursive loop": "{% for x in [1] recursive %}{{ loop([1]) }}{% endfor %}",
    "loops that fan out": "{% for x in [60] recursive %}{% if x %}{{ loop([x - 1, x - 1]) }}{% endif %}{% endfor %}",
    "block in itself": "{% block b %}{{ self.b() }}{{ self.b() }}{% endblock %}",
    "repeated text": "{{ 'a' * 10**9 }}",
    "repeated text, the other way": "{{ 10**9 * 'a' }}",
    "repeated list": "{{ ([1] * 10**9) | length }}",
    "repeated by a constant": "{% set x = 'a' * 1000000000000 %}",
    "power": "{{ 10 ** 10000000 }}",
    "growing integer": doubled("7", "ns.x * ns.x", ""),
    "doubled text": doubled("'ab'", "ns.x + ns.x", ""),
    "doubled text by ~": doubled("'ab'", "ns.x ~ ns.x", ""),
    "doubled text by format": doubled("'ab'", "'%s%s' % (ns.x, ns.x)", ""),
    "doubled text by str.format": doubled("'ab'", "'{0}{0}'.format(ns.x)", ""),
    "doubled text by str.format_map": doubled("'ab'", "'{a}{a}'.format_map({'a': ns.x})", ""),
    "doubled text by the format filter": doubled("'ab'", "'%s%s' | format(ns.x, ns.x)", ""),
    "doubled text by join": doubled("'ab'", "[ns.x, ns.x] | join", ""),
    "doubled text by str.join": doubled("'ab'", "ns.x.join(['', '', ''])", ""),
    "doubled text by replace": doubled("'ab'", "ns.x | replace('b', 'bab')", ""),
    "doubled text by str.replace": doubled("'ab'", "ns.x.replace('b', 'bab')", ""),
    "doubled text by a set block": doubled("'ab'", "ns.x", "").replace(
        "{% set ns.x = ns.x %}", "{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = y %}"
    ),
    "doubled text by a macro": "{% macro m(x) %}{{ x }}{{ x }}{% endmacro %}" + doubled("'ab'", "m(ns.x)", ""),
    "doubled list": doubled("[1]", "ns.x + ns.x", ""),
    "letters joined": doubled("'ab'", "ns.x | list | join('ab')", ""),
    "escapes of escapes": doubled("'<'", "ns.x | replace('<', '<<') | e | string", ""),
    "JSON of JSON": doubled("['\\\\\"']", "[ns.x | tojson]", ""),
    "padding, again and again": doubled("'a'", "ns.x | indent(999, true)", ""),
    "joined by a long text": BIG + "{{ range(99999) | join(big) }}",
    "str.join of a range": BIG + "{{ big.join(range(99999) | map('string')) }}",
    "replaced by a long text": BIG + "{{ big | replace('a', big) }}",
    "str.replace by a long text": BIG + "{{ big.replace('a', big) }}",
    "every letter replaced": BIG + "{{ big | replace('', big) }}",
    "indented lines": "{{ ('\\n' * 99999) | indent(999) | indent(999) }}",
    "indented JSON": doubled("[range(99) | list]", "[ns.x]", "{{ ns.x | tojson(indent=16) | length }}" * 999),
    "comparing long texts": BIG + TURNS.replace("USE", "{{ big == big ~ 'x' }}"),
    "searching a long text": BIG + TURNS.replace("USE", "{{ 'c' in big }}"),
    "searching a range by filter": TURNS.replace("USE", "{{ range(99999) | last }}"),
    "slices": BIG + TURNS.replace("USE", "{% set x = big[1:] %}"),
    "spread arguments": "{% macro m() %}{{ varargs | length }}{% endmacro %}"
    + TURNS.replace("USE", "{{ m(*range(99999)) }}"),
    "spread named arguments": "{% macro m() %}{{ kwargs }}{% endmacro %}"
    + TURNS.replace("USE", "{{ m(**messages[0]) }}").replace("m()", "m(role, content)"),
    "filters over filters": "{% set ns = namespace(x=range(99999)) %}{% for _ in range(500) %}"
    "{% set ns.x = ns.x | select %}{% endfor %}{{ ns.x | list | length }}",
    "maps over maps": "{% set ns = namespace(x=range(99999)) %}{% for _ in range(90) %}"
    "{% set ns.x = ns.x | map('string') %}{% endfor %}{{ ns.x | list | length }}",
    "written nest": TWICE.replace("USE", "{{ ns.x }}"),
    "written nest of a namespace": TWICE.replace("USE", "{{ ns }}"),
    "nest in ~": TWICE.replace("USE", "{{ ns.x ~ '' }}"),
    "nest in str.format": TWICE.replace("USE", "{{ '{}'.format(ns.x) }}"),
    "nest in format": TWICE.replace("USE", "{{ '%s' % [ns.x] }}"),
    "nest as JSON": TWICE.replace("USE", "{{ ns.x | tojson }}"),
    "nest as text": TWICE.replace("USE", "{{ ns.x | string | length }}"),
    "nest joined": TWICE.replace("USE", "{{ ns.x | join }}"),
    "nest compared": TWICE.replace("USE", "{{ ns.x == [[ns.x[0], ns.x[1]], ns.x[1]] }}"),
    "nest compared by a test": TWICE.replace("USE", "{{ ns.x is eq [ns.x[0], [ns.x[1]]] }}"),
    "nest sought": TWICE.replace("USE", "{{ [ns.x[0], 2] in ns.x }}"),
    "nest sought by a method": TWICE.replace("USE", "{{ ns.x.index([ns.x[0], 2]) }}"),
    "nest that changes": TWICE.replace("USE", "{% for y in [ns.x, ns.x] %}{{ loop.changed(y) }}{% endfor %}"),
    "nest sorted": TWICE.replace("USE", "{{ [ns.x, [ns.x[0], 2]] | sort }}"),
    "hashed nest": PAIRS.replace("USE", "{{ {}[ns.x] }}"),
    "hashed nest as a key": PAIRS.replace("USE", "{% set d = {ns.x: 1} %}"),
    "hashed nest in get": PAIRS.replace("USE", "{{ {}.get(ns.x) }}"),
    "hashed nest in unique": PAIRS.replace("USE", "{{ [ns.x, ns.x] | unique | list }}"),
    "deep tuple as a key": DEEP.replace("USE", "{{ {}[ns.x] }}"),
    "deep tuple in dict": DEEP.replace("USE", "{{ dict([(ns.x, 1)]) }}"),
    "deep tuple in dict, one by one": DEEP.replace("USE", "{{ dict([(ns.x, 1)] | select) }}"),
    "deep tuple in get": DEEP.replace("USE", "{{ {}.get(ns.x) }}"),
    "deep tuple in unique": DEEP.replace("USE", "{{ [ns.x] | unique | list }}"),
    "deep tuple in unique, one by one": DEEP.replace("USE", "{{ [ns.x] | select | unique | list }}"),
    "deep tuple sought": DEEP.replace("USE", "{{ ns.x in {} }}"),
    "deep tuple sought by select": DEEP.replace("USE", "{{ [ns.x] | select('in', {}) | list }}"),
    "deep tuple grouped": DEEP.replace("USE", "{{ [ns.x] | select | groupby(0) }}"),
    "deep list": DEEP.replace("(ns.x,)", "[ns.x]").replace("USE", "{{ ns.x }}"),
    "nest sorted, one by one": TWICE.replace("USE", "{{ [ns.x, [ns.x[0], 2]] | select | sort }}"),
    "nest in max, one by one": TWICE.replace("USE", "{{ [ns.x, [ns.x[0], 2]] | select | max }}"),
    "namespace in itself": "{% set ns = namespace(x=1) %}{% set ns.x = ns %}{{ ns }}",
    "messages, again and again": TURNS.replace("USE", "{% for m in messages %}{{ m | tojson }}{% endfor %}"),
}  # fmt: skip

REFUSED = {
    "padded by str.center": "{{ 'a'.center(10**9) }}",
    "padded by str.ljust": "{{ 'a'.ljust(10**9) }}",
    "padded by str.zfill": "{{ 'a'.zfill(10**9) }}",
    "tabs": "{{ '\\t'.expandtabs(10**9) }}",
    "width in %": "{{ '%1000000000d' % 1 }}",
    "width in %, given": "{{ '%*d' % (10**9, 1) }}",
    "precision in %": "{{ '%.1000000000f' % 1.5 }}",
    "width in the format filter": "{{ '%1000000000s' | format('a') }}",
    "width in str.format": "{{ '{:1000000000}'.format('a') }}",
    "width in str.format, given": "{{ '{:{w}}'.format('a', w=10**9) }}",
    "width in str.format_map": "{{ '{a:1000000000}'.format_map({'a': 'a'}) }}",
    "indent of JSON": "{{ messages | tojson(indent=10**9) }}",
    "indent of JSON, text": "{{ messages | tojson(indent='          and more') }}",
    "separator of JSON": "{{ messages | tojson(separators=(',' * 99, ':')) }}",
    "range": "{{ range(10**9) | list }}",
    "time": "{{ strftime_now('%Y' * 10000) }}",
    "sum of lists": "{{ [[1], [2]] | sum(start=[]) }}",
    "class by a filter": "{{ '' | attr('__class__') | attr('mro') }}",
    "class by an item": "{{ ''['__class__']['__mro__'] }}",
    "class by a field": "{{ '{0.__class__.__mro__}'.format('') }}",
    "class by a mapped attribute": "{{ ([''] | map(attribute='__class__') | first).mro() }}",
    "globals of a macro": "{% macro m() %}{% endmacro %}{{ m._func.__globals__ }}",
    "context of a loop": "{% for x in [1] %}{{ loop._context.environment }}{% endfor %}",
    "subclasses": "{{ [].__class__.__base__.__subclasses__() }}",
    "translation": "{{ 'a'.translate({97: 'b' * 1000}) }}",
    "bytes": "{{ 'a'.encode() }}",
    "changed list": "{{ messages.append(1) }}",
    "changed dictionary": "{{ messages[0].update({'role': 'x'}) }}",
    "class method": "{{ dict.fromkeys(range(9)) }}",
    "other template": "{% include 'config.json' %}",
    "bits": "{{ (5).bit_length() }}",
}  # fmt: skip

NOTHING = {
    "class of a text": "{{ ''.__class__ }}",
    "globals of a function": "{{ strftime_now.__globals__ }}",
    "environment of a macro": "{% macro m() %}{% endmacro %}{{ m._environment }}",
    "frame of a generator": "{{ (messages | map('length')).gi_frame }}",
}

NEARLY = "{% set t = 'a' * 100000 %}{% set h = 'ab' + 'a' * 50000 %}"
LONG_HOLDS = {  # one call each
    "rfind": NEARLY + "{{ t.rfind(h) }}",
    "rindex": NEARLY + "{{ t.rindex(h) }}",
    "rsplit": NEARLY + "{{ t.rsplit(h) | length }}",
    "rpartition": NEARLY + "{{ t.rpartition(h) | length }}",
    "strip": "{% set t = 'a' * 90000 %}{{ t.strip('b' * 90000 + 'a') | length }}",
    "trim": "{% set t = 'a' * 90000 %}{{ t | trim('b' * 90000 + 'a') | length }}",
    "round to the left": "{{ 5 | round(-100000000) }}",
    "path of attributes": "{% set ns = namespace(x=1) %}{% set ns.x = ns %}"
    "{{ ([ns] * 5000) | map(attribute='x' + '.x' * 20000) | list | length }}",
}
COLLIDING = {
    "literal integers": "{{ {2305843009213693951: 1, 4611686018427387902: 2} }}",
    "computed integers": "{{ (2**59 - 1) * 4 }}",
    "added integers": "{% set x = 2**59 %}{{ x + x }}",
    "parsed integers": "{{ 'ffffffffffffffffffff' | int(0, 16) }}",
    "tuples in dict": "{{ dict([((1, 2), 3)]) }}",
    "tuples in a literal": "{{ {(1, 2): 3} }}",
    "tuples in unique": "{{ [(1, 2), (2, 1)] | unique | list }}",
    "tuples of an attribute": "{{ [{'a': (1, 2)}] | unique(attribute='a') | list }}",
}
