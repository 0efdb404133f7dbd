"""Make theme/fonts/stix-two-math.woff2: of STIX Two Math what the book's formulas may hold.

    npm install @fontsource/stix-two-math
    python tools/math_font.py FOLDER/files/stix-two-math-latin-400-normal.woff2 OUTPUT

Needs fonttools and brotli. The sizes of brackets, roots and sums, and the small letters of
exponents, come along with their characters.
"""

import sys
import unicodedata

RANGES = [
    (0x20, 0x7E),
    (0x391, 0x3C9),  # Greek
    (0x1D434, 0x1D467),  # a single letter is set in italics, which are characters of their own
    (0x1D6E2, 0x1D71B),
]
OTHERS = "\u00a0\u2009\u2061\u2062\u2063\u2064\u0302\u0303\u0304\u0305\u0307\u0332\u20d7" + (
    "¬¯±²³·×÷ˆ˙˜ϑϕϵ–—‖‘’“”†‡•…‾′″⋮⋯⋱ℎℓℕℝ"
    "←↑→↓↔⇐⇒⇔↦⟵⟶⟷⟸⟹⟺∀∂∃∅∇∈∉∋∏∑−∓∖∗∘√∝∞∣∥∧∨∩∪∫∼≃≈≔≠≡≤≥≪≫≲≳⊂⊆⊕⊗⊙⋅⌈⌉⌊⌋⟨⟩⏞⏟"
)
IN_RANGES = {chr(code) for first, last in RANGES for code in range(first, last + 1)}
CHARACTERS = {char for char in IN_RANGES if unicodedata.name(char, "")} | {*OTHERS}


def main(source: str, output: str) -> None:
    from fontTools import subset

    options = subset.Options(
        flavor="woff2", hinting=False, layout_features=["ssty", "dtls", "ccmp", "locl"],
        name_IDs=[0, 1, 2, 3, 4, 5, 6, 13, 14], notdef_outline=True,
    )  # fmt: skip
    options.drop_tables += ["GPOS"]
    font = subset.load_font(source, options)
    subsetter = subset.Subsetter(options)
    subsetter.populate(text="".join(CHARACTERS))
    subsetter.subset(font)
    subset.save_font(font, output, options)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])
