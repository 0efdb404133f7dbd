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

local function has_list(blocks)
  local found = false
  blocks:walk { Div = function(div) found = found or div.identifier == "refs" end }
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
  if not has_list(doc.blocks) then
    doc.blocks:insert(pandoc.Header(2, "References", pandoc.Attr("references", { "unnumbered" })))
    doc.blocks:insert(pandoc.Div({}, pandoc.Attr("refs")))
  end
  return doc
end

local function only_citations(inline)
  if inline.t ~= "Cite" then return false end
  for _, citation in ipairs(inline.citations) do
    if not M.is_citation(citation) then return false end
  end
  return true
end

local function is_space(inline) return inline and (inline.t == "Space" or inline.t == "SoftBreak") end

-- Takes the space before a citation away, be it one that breaks or not.
local function remove_space(inlines)
  local last = inlines[#inlines]
  if is_space(last) then
    inlines:remove()
  elseif last and last.t == "Str" then
    last.text = last.text:gsub("\u{a0}$", "")
  end
end

-- A block without its citations and the spaces before them: for tooltips.
function M.without(block)
  return block:walk {
    Inlines = function(inlines)
      local kept = pandoc.Inlines {}
      for _, inline in ipairs(inlines) do
        if not only_citations(inline) then
          kept:insert(inline)
        else
          remove_space(kept)
        end
      end
      return kept
    end,
  }
end

return M
