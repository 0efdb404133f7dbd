-- `.term`: a link to the glossary that carries the definition; and the names of the glossary's entries.

local import = ...
local citations = import "citations"
local errors = import "errors"
local project = import "project"
local sorted_keys = import "sorted_keys"
local value = import "value"

local M = {}

local GLOSSARY = "appendix/glossary.qmd"
local stringify = pandoc.utils.stringify

local function key_of(text) return (text:lower():gsub("%s+", " ")) end

local function identifier(key) return "term-" .. key:gsub("%W+", "-") end

-- A formula as text: N − 1 for `N-1`.
local function formula_text(math)
  local text = pandoc.write(pandoc.Pandoc { pandoc.Plain { math } }, "plain")
  return (text:gsub("\u{2005}", " "):gsub("%s+$", ""))
end

-- The first paragraph of a definition as plain text, with its recorded values and formulas filled in.
local function plain_text(definitions)
  return citations.text_without(definitions[1][1]:walk {
    Span = function(span)
      if span.classes:includes("val") then return value(span, errors.of(span, "val", GLOSSARY)) end
    end,
    Math = function(math) return pandoc.Str(formula_text(math)) end,
  })
end

local entries

-- term in lower case → its definitions
local function read_entries(fail)
  if entries then return entries end
  local text = project.read(GLOSSARY) or fail("there is no " .. GLOSSARY)
  entries = {}
  pandoc.read(text, "markdown").blocks:walk {
    DefinitionList = function(list)
      for _, item in ipairs(list.content) do entries[key_of(stringify(item[1]))] = item[2] end
    end,
  }
  return entries
end

function M.term(span, fail)
  local key = key_of(span.attributes.key or stringify(span))
  local known = read_entries(fail)
  if not known[key] then
    fail(('no term "%s" in %s (it has: %s)'):format(key, GLOSSARY, table.concat(sorted_keys(known), ", ")))
  end
  local page = project.page == GLOSSARY and "" or project.link(GLOSSARY)
  local attributes = { ["data-tip"] = plain_text(known[key]) }
  return pandoc.Link(span.content, page .. "#" .. identifier(key), "", pandoc.Attr("", { "term" }, attributes))
end

-- Gives every entry of the glossary the name that `.term` links to.
function M.name_terms(blocks)
  if project.page ~= GLOSSARY then return blocks end
  local named = {}
  return blocks:walk {
    DefinitionList = function(list)
      for position, item in ipairs(list.content) do
        local name = identifier(key_of(stringify(item[1])))
        if named[name] then errors.stop(("%s: two entries have the name #%s"):format(GLOSSARY, name)) end
        named[name] = true
        list.content[position] = { { pandoc.Span(item[1], { id = name }) }, item[2] }
      end
      return list
    end,
  }
end

return M
