-- `.term`: a link to the glossary that carries the definition; and the names of the glossary's entries.

local import = ...
local citations = import "citations"
local place = import "place"
local project = import "project"
local value = import "value"

local M = {}

local GLOSSARY = "chapters/glossary.qmd"
local stringify = pandoc.utils.stringify

local function key_of(text) return (text:lower():gsub("%s+", " ")) end

local function identifier(key) return "term-" .. key:gsub("%W+", "-") end

-- The first paragraph of a definition as plain text, with its recorded values filled in.
local function plain_text(definitions)
  local filled = citations.without(definitions[1][1]):walk {
    Span = function(span)
      if span.classes:includes("val") then return value(span, place.of(span, "val", GLOSSARY)) end
    end,
  }
  return stringify(filled)
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

-- The number of letters to insert, delete or change to make one word of the other.
local function distance(one, other)
  local row = {}
  for column = 0, #other do row[column] = column end
  for line = 1, #one do
    local diagonal
    diagonal, row[0] = row[0], line
    for column = 1, #other do
      local changed = diagonal + (one:byte(line) == other:byte(column) and 0 or 1)
      diagonal = row[column]
      row[column] = math.min(changed, diagonal + 1, row[column - 1] + 1)
    end
  end
  return row[#other]
end

local function near_misses(key, known)
  local near = {}
  for candidate in pairs(known) do
    local contained = candidate:find(key, 1, true) or key:find(candidate, 1, true)
    if contained or distance(key, candidate) <= math.max(2, #key // 3) then table.insert(near, candidate) end
  end
  table.sort(near)
  return #near > 0 and "near: " .. table.concat(near, ", ") or "nothing in it is near"
end

function M.term(span, fail)
  local key = key_of(span.attributes.key or stringify(span))
  local known = read_entries(fail)
  if not known[key] then
    fail(('no term "%s" in %s (%s)'):format(key, GLOSSARY, near_misses(key, known)))
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
        if named[name] then place.stop(("%s: two entries have the name #%s"):format(GLOSSARY, name)) end
        named[name] = true
        list.content[position] = { { pandoc.Span(item[1], { id = name }) }, item[2] }
      end
      return list
    end,
  }
end

return M
