-- `.term`: a link to the glossary that carries the definition; and the names of the glossary's entries.

local import = ...
local citations = import "citations"
local errors = import "errors"
local project = import "project"
local value = import "value"

local M = {}

local GLOSSARY = "chapters/glossary.qmd"
local stringify = pandoc.utils.stringify

local function key_of(text) return (text:lower():gsub("%s+", " ")) end

local function identifier(key) return "term-" .. key:gsub("%W+", "-") end

-- A formula as text: N − 1 for `N-1`, (S)/(B) for `\frac{S}{B}`.
local function formula_text(tex)
  tex = tex:gsub("\\[dt]?frac(%b{})(%b{})", function(above, below)
    return "(" .. above:sub(2, -2) .. ")/(" .. below:sub(2, -2) .. ")"
  end)
  local formula = pandoc.Pandoc { pandoc.Plain { pandoc.Math("InlineMath", tex) } }
  local _, text = pandoc.log.silence(function() return pandoc.write(formula, "plain") end)
  return (text:gsub("\u{2005}", " "):gsub("%s+$", ""))
end

-- The first paragraph of a definition as plain text, with its recorded values and formulas filled in.
local function plain_text(definitions)
  local filled = citations.without(definitions[1][1]):walk {
    Span = function(span)
      if span.classes:includes("val") then return value(span, errors.of(span, "val", GLOSSARY)) end
    end,
    Math = function(math)
      return pandoc.Str(formula_text(math.text))
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

-- first word → the terms that begin with it, each a list of words, the longest first
local function terms_by_first_word(known)
  local found = {}
  for key in pairs(known) do
    local words = {}
    for word in key:gmatch("%S+") do table.insert(words, word) end
    found[words[1]] = found[words[1]] or {}
    table.insert(found[words[1]], words)
  end
  for _, terms in pairs(found) do
    table.sort(terms, function(one, other) return #one > #other end)
  end
  return found
end

local function terms_at(starting, text)
  local word = text:lower():match("^[^.,;:)]*")
  return starting[word] or starting[(word:gsub("s$", ""))]
end

-- Whether the words stand at `position`; the last may be a plural, and have a mark after it.
local function stands_at(inlines, position, words)
  for number, word in ipairs(words) do
    local at = position + 2 * (number - 1)
    local inline, before = inlines[at], inlines[at - 1]
    if not inline or inline.t ~= "Str" then return nil end
    if number > 1 and before.t ~= "Space" and before.t ~= "SoftBreak" then return nil end
    local text, mark = inline.text:match("^(.-)([.,;:)]*)$")
    local low = text:lower()
    local is_last = number == #words
    if low ~= word and not (is_last and low == word .. "s") or not is_last and mark ~= "" then return nil end
    if is_last then return at, text, mark end
  end
end

-- Links each term of the glossary where it stands first in the text below a heading of level 3 or above.
function M.link_terms(blocks, fail)
  local known = read_entries(fail)
  local starting, linked = terms_by_first_word(known), {}
  local function link(inlines)
    local done, position = pandoc.Inlines {}, 1
    while position <= #inlines do
      local inline, last = inlines[position], nil
      for _, words in ipairs(inline.t == "Str" and terms_at(starting, inline.text) or {}) do
        local key = table.concat(words, " ")
        local text, mark
        last, text, mark = stands_at(inlines, position, words)
        if last and not linked[key] then
          linked[key] = true
          local content = pandoc.Inlines { table.unpack(inlines, position, last - 1) }
          content:insert(pandoc.Str(text))
          done:insert(M.term(pandoc.Span(content, { key = key })))
          if mark ~= "" then done:insert(pandoc.Str(mark)) end
          break
        end
        last = nil
      end
      if not last then done:insert(inline) end
      position = (last or position) + 1
    end
    return done
  end
  return pandoc.Blocks(blocks:map(function(block)
    if block.t == "Header" then
      if block.level <= 3 then linked = {} end
      return block
    end
    return block:walk {
      traverse = "topdown",
      Link = function(element) return element, false end,
      Inlines = link,
    }
  end))
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
