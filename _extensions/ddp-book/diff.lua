-- `.diff`: what changes from one file to the next, function by function, with annotations beside it.

local import = ...
local annotations = import "annotations"
local frame = import "frame"
local project = import "project"
local python = import "python"

local CONTEXT = 2 -- unchanged lines that are shown beside a change
local SHORTEST_GAP = 3 -- so many are shown rather than counted

local NAMES = { ["+"] = "Added", ["-"] = "Removed", [" "] = "Unchanged" }
local ELEMENTS = { ["+"] = "ins", ["-"] = "del", [" "] = "span" }

local diffs = 0 -- on this page

-- For each pair of positions how many lines the rests of the two lists have in common, in their order.
local function common_lengths(old, new)
  local lengths = {}
  for i = #old + 1, 1, -1 do
    lengths[i] = {}
    for j = #new + 1, 1, -1 do
      if i > #old or j > #new then
        lengths[i][j] = 0
      elseif old[i].text == new[j].text then
        lengths[i][j] = lengths[i + 1][j + 1] + 1
      else
        lengths[i][j] = math.max(lengths[i + 1][j], lengths[i][j + 1])
      end
    end
  end
  return lengths
end

-- The lines of both lists in one, each with a sign; where lines are replaced, the old ones come first.
local function compare(old, new)
  local lengths, merged, added = common_lengths(old, new), {}, {}
  local function add(sign, line, list) table.insert(list, { sign = sign, text = line.text, html = line.html }) end
  local function flush()
    table.move(added, 1, #added, #merged + 1, merged)
    added = {}
  end
  local i, j = 1, 1
  while i <= #old or j <= #new do
    if i <= #old and j <= #new and old[i].text == new[j].text then
      flush()
      add(" ", new[j], merged)
      i, j = i + 1, j + 1
    elseif j > #new or i <= #old and lengths[i + 1][j] >= lengths[i][j + 1] then
      add("-", old[i], merged)
      i = i + 1
    else
      add("+", new[j], added)
      j = j + 1
    end
  end
  flush()
  return merged
end

-- The file's lines as Pandoc colours them.
local function highlighted(text)
  local html = pandoc.write(pandoc.Pandoc { pandoc.CodeBlock(text, { class = "python" }) }, "html")
  local lines = {}
  for line in (html:match("<code[^>]*>(.*)</code>") .. "\n"):gmatch("(.-)\n") do
    table.insert(lines, (line:gsub("^<span id=[^>]*><a [^>]*></a>(.*)</span>$", "%1")))
  end
  return lines
end

-- The parts of a file, by name and in their order: { name, lines }.
local function parts_of(path, fail)
  if not path then fail('expected from="path" and to="path"') end
  local text = project.read(path) or fail("no such file: " .. path)
  local parts, lines = python.parts(text)
  local html = highlighted(text)
  for _, part in ipairs(parts) do
    part.lines = {}
    for _, number in ipairs(part.numbers) do
      table.insert(part.lines, { text = lines[number], html = html[number] })
    end
    parts[part.name] = part
  end
  return parts
end

-- The parts of both files: those of the new one, and each removed one where it stood.
local function compared_parts(old, new)
  local found, next_old = {}, 1
  local function removed_before(position)
    while next_old < position do
      local part = old[next_old]
      if not new[part.name] then table.insert(found, { name = part.name, lines = compare(part.lines, {}), said = ", removed" }) end
      next_old = next_old + 1
    end
  end
  for _, part in ipairs(new) do
    local before = old[part.name]
    for position, other in ipairs(old) do
      if other == before then removed_before(position) end
    end
    local said = not before and ", new" or ""
    table.insert(found, { name = part.name, lines = compare(before and before.lines or {}, part.lines), said = said })
  end
  removed_before(#old + 1)
  return found
end

local function is_changed(part)
  for _, line in ipairs(part.lines) do
    if line.sign ~= " " then return true end
  end
  return false
end

-- The parts that the page names ("main Trainer imports end-of-the-file"), or all that changed.
local function shown_parts(parts, attributes, fail)
  local symbols, shown, names, wanted = attributes.symbol, {}, {}, {}
  for name in (symbols or ""):gmatch("%S+") do wanted[name] = true end
  for _, part in ipairs(parts) do
    local name = part.name:gsub("%(%)$", ""):gsub("^class ", ""):gsub(" ", "-")
    local left_out = part.name == "top of the file" and attributes.docstring == "no"
    if is_changed(part) and not left_out then
      if not symbols or wanted[name] then table.insert(shown, part) end
      wanted[name] = nil
      table.insert(names, name)
    end
  end
  if #names == 0 then fail("the files do not differ") end
  local missing = next(wanted)
  if missing then fail(("no change in %s (there is one in: %s)"):format(missing, table.concat(names, ", "))) end
  return shown
end

-- Leaves out long stretches of unchanged lines: they become one entry with their number, `gap`.
local function elided(lines)
  local near = {}
  for number, line in ipairs(lines) do
    for other = number - CONTEXT, number + CONTEXT do
      near[other] = near[other] or line.sign ~= " "
    end
  end
  local kept, gap = {}, {}
  local function flush()
    local whole = #gap > SHORTEST_GAP and { { gap = #gap } } or gap
    table.move(whole, 1, #whole, #kept + 1, kept)
    gap = {}
  end
  for number, line in ipairs(lines) do
    if near[number] then
      flush()
      table.insert(kept, line)
    else
      table.insert(gap, line)
    end
  end
  flush()
  return kept
end

local function line_html(line, cell)
  local sign = ('<span class="diff-sign" aria-hidden="true">%s </span>'):format(line.sign)
  return ('<span class="diff-line" id="%s-%d">%s%s\n</span>'):format(cell, line.number, sign, line.html)
end

-- A part's lines: each run of added, removed or unchanged ones is an element that begins with that word.
local function part_html(part, cell)
  local html, run = { ('<span class="diff-place">%s%s\n</span>'):format(part.name, part.said) }, nil
  for _, line in ipairs(part.lines) do
    if run and run ~= line.sign then table.insert(html, ("</%s>"):format(ELEMENTS[run])) end
    if line.sign and line.sign ~= run then
      table.insert(html, ('<%s><span class="visually-hidden">%s: </span>'):format(ELEMENTS[line.sign], NAMES[line.sign]))
    end
    run = line.sign
    local gap = line.gap and ('<span class="diff-gap">… %d unchanged lines\n</span>'):format(line.gap)
    table.insert(html, gap or line_html(line, cell))
  end
  if run then table.insert(html, ("</%s>"):format(ELEMENTS[run])) end
  return table.concat(html)
end

return function(div, fail)
  local from, to = div.attributes.from, div.attributes.to
  local parts = compared_parts(parts_of(from, fail), parts_of(to, fail))
  parts = shown_parts(parts, div.attributes, fail)
  local lines, texts = {}, {}
  for _, part in ipairs(parts) do
    part.lines = elided(part.lines)
    for _, line in ipairs(part.lines) do
      if line.sign then
        table.insert(lines, line)
        line.number = #lines
        table.insert(texts, (line.sign .. " " .. line.text:gsub("^%s+", "")):match("^%s*(.*)$"))
      end
    end
  end
  local notes = annotations.find(div, texts, ("what changes from %s to %s"):format(from, to), fail)
  diffs = diffs + 1
  local cell, html = "diff-" .. diffs, {}
  for _, part in ipairs(parts) do table.insert(html, part_html(part, cell)) end
  local code = '<div class="sourceCode" id="%s"><pre class="sourceCode python"><code class="sourceCode python">'
    .. '<span class="code-annotation-diff">%s</span></code></pre></div>'
  local blocks = annotations.beside(code:format(cell, table.concat(html)), notes, texts, cell)
  div.classes:insert(1, "code")
  return frame(div, to, "what changes from " .. from, blocks, project.read(to))
end
