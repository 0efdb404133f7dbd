-- Citations: each names an entry of the book's bibliography, and what a page cites is listed at its end.

local import = ...
local errors = import "errors"
local project = import "project"

local M = {}

-- `@fig-ring` is a cross-reference, not a citation.
local CROSS_REFERENCES = { fig = true, tbl = true, sec = true, eq = true, lst = true }

function M.is_citation(citation)
  local kind = citation.id:match("^(%a+)%-")
  return not (kind and CROSS_REFERENCES[kind])
end

-- The keys that the page cites, in order; each once.
local function cited(blocks)
  local found, known = {}, {}
  blocks:walk {
    Cite = function(cite)
      for _, citation in ipairs(cite.citations) do
        if M.is_citation(citation) and not known[citation.id] then
          known[citation.id] = true
          table.insert(found, citation.id)
        end
      end
    end,
  }
  return found
end

-- Stops at the first key that the bibliography lacks.
local function check(keys, doc)
  local known = {}
  for _, reference in ipairs(pandoc.utils.references(doc)) do known[reference.id] = true end
  local path = pandoc.utils.stringify(doc.meta.bibliography or "no bibliography"):match("[^/]+$")
  for _, key in ipairs(keys) do
    if not known[key] then
      errors.stop(("%s%s: @%s: no such entry in %s"):format(project.page, errors.line_of("@" .. key), key, path))
    end
  end
end

-- The document with a heading and a place for the list of what it cites.
function M.with_references(doc)
  local keys = cited(doc.blocks)
  if #keys == 0 then return doc end
  check(keys, doc)
  doc.blocks:insert(pandoc.Header(2, "References", pandoc.Attr("references", { "unnumbered" })))
  doc.blocks:insert(pandoc.Div({}, pandoc.Attr("refs")))
  return doc
end

-- The text of a block without its citations and the spaces before them: for tooltips.
function M.text_without(block)
  local text = pandoc.utils.stringify(block:walk {
    Cite = function(cite)
      if M.is_citation(cite.citations[1]) then return pandoc.Str "\1" end
    end,
  })
  return (text:gsub("%s+\1", ""):gsub("\u{a0}\1", ""):gsub("\1", ""))
end

return M
