-- The book's own markup, for Quarto (registered `at: pre-ast`) and for `pandoc --lua-filter`.
-- chapters/README.md shows each construct.

local here = pandoc.path.directory(PANDOC_SCRIPT_FILE)
local loaded = {}

-- Loads a module of this folder once. `require` would look in other places first.
local function import(name)
  if not loaded[name] then
    local chunk = assert(loadfile(pandoc.path.join { here, name .. ".lua" }))
    loaded[name] = chunk(import, here)
  end
  return loaded[name]
end

local about = import "about"
local resolve_addresses = import "address"
local boxes = import "boxes"
local citations = import "citations"
local glossary = import "glossary"
local measured = import "measured"
local name_headers = import "headers"
local notebook = import "notebook"
local keep_formulas = import "nobreak"
local errors = import "errors"
local provenance = import "provenance"
local reading_time = import "reading_time"

local spans = { val = import "value", term = glossary.term }
local divs = {
  code = import "code",
  diff = import "diff",
  run = import "run",
  diagram = import("diagram").diagram,
  interactive = import "interactive",
  notebook = notebook.notebook,
  recordings = notebook.recordings,
  parity = import "parity",
  measured = measured.measured,
  measurements = measured.measurements,
  reference = import "reference",
  versions = about.versions,
  cite = about.cite,
  document = about.document,
  takeaways = boxes.takeaways,
  objectives = boxes.objectives,
  exercise = boxes.exercise,
  answer = boxes.answer,
  predict = boxes.predict,
  reveal = boxes.reveal,
}

-- The function that replaces an element by what the renderer of its class makes of it.
local function replace_by(renderers)
  return function(element)
    for _, class in ipairs(element.classes) do
      if renderers[class] then return renderers[class](element, errors.of(element, class)) end
    end
  end
end

function Pandoc(doc)
  if quarto and not FORMAT:match "^html" then errors.stop(FORMAT .. ": `make downloads` makes the EPUB and the PDF") end
  errors.check_fences(doc.blocks)
  local words = reading_time.words(doc.blocks)
  local blocks = glossary.name_terms(resolve_addresses(doc.blocks))
  blocks = blocks:walk { Span = replace_by(spans) }
  blocks = provenance.shorten(blocks:walk { Div = replace_by(divs) })
  doc.blocks = reading_time.insert(name_headers(keep_formulas(blocks)), words)
  return citations.with_references(doc)
end

return { { Pandoc = Pandoc } }
