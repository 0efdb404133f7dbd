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

-- The document with a heading and a place for the list of what it cites. Stops at a key that the
-- bibliography lacks.
function M.with_references(doc)
  local known, cites = {}, false
  for _, reference in ipairs(pandoc.utils.references(doc)) do known[reference.id] = true end
  doc.blocks:walk {
    Cite = function(cite)
      for _, citation in ipairs(cite.citations:filter(M.is_citation)) do
        cites = true
        if not known[citation.id] then
          local path = pandoc.utils.stringify(doc.meta.bibliography or "no bibliography"):match("[^/]+$")
          local place = project.page .. errors.line_of("@" .. citation.id)
          errors.stop(("%s: @%s: no such entry in %s"):format(place, citation.id, path))
        end
      end
    end,
  }
  if not cites then return doc end
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
