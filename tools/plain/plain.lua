-- What Quarto does to a page, for plain Pandoc: numbers, cross-references, tabs.
-- Runs after the book's own filter. Hands the page's title and the text of every
-- cross-reference target to build.py through the template variable `index`.

local KINDS = { fig = "Figure", tbl = "Table", eq = "Equation", sec = "Section" }
local page, root = "", ""
local targets = {} -- id → text, e.g. fig-ring → "Figure 1"
local counts = {}  -- kind → how many so far
local tabsets = 0

local function fail(message)
  io.stderr:write(page .. ": " .. message .. "\n")
  os.exit(1)
end

local function raw(html) return pandoc.RawBlock("html", html) end

local function kind_of(id)
  local kind = id:match("^(%a+)%-")
  return kind and KINDS[kind] and kind
end

local function add_target(id, text)
  if targets[id] then fail("the name #" .. id .. " is used twice") end
  targets[id] = text
end

local function next_number(id)
  local kind = kind_of(id)
  counts[kind] = (counts[kind] or 0) + 1
  add_target(id, KINDS[kind] .. "\u{a0}" .. counts[kind])
  return counts[kind]
end

local function label(id)
  next_number(id)
  return pandoc.Inlines { pandoc.Str(targets[id] .. ": ") }
end

local function number_caption(blocks, id)
  local first = blocks[1]
  if not first then return pandoc.Blocks { pandoc.Plain(label(id)) } end
  first.content = label(id) .. first.content
  return blocks
end

-- Headings ---------------------------------------------------------------------------------------

-- A section is called by its title.
local function add_section(id, content)
  local title = pandoc.utils.stringify(content)
  if kind_of(id) == "sec" then add_target(id, title) end
end

local function Header(header) add_section(header.identifier, header.content) end

-- The page's title: of the metadata, else its first heading.
local function take_title(doc)
  local title, id = doc.meta.title, ""
  for position, block in ipairs(doc.blocks) do
    if block.t == "Header" and block.level == 1 then
      if title then break end
      title, id = block.content, block.identifier
      doc.blocks:remove(position)
      break
    end
  end
  if not title then fail("no title: start the page with '# Title' or set title in its metadata") end
  add_section(id, title)
  return pandoc.Inlines(title), id
end

-- Figures, tables, equations ---------------------------------------------------------------------

local function Figure(figure)
  if not kind_of(figure.identifier) then return nil end
  figure.caption.long = number_caption(figure.caption.long, figure.identifier)
  return figure
end

-- A table with a caption becomes a figure, as in Quarto.
local function Table(tbl)
  local caption, id = tbl.caption.long, tbl.identifier
  if #caption == 0 then return nil end
  if kind_of(id) then caption = number_caption(caption, id) end
  tbl.caption, tbl.identifier = pandoc.Caption(), ""
  return pandoc.Figure({ tbl }, pandoc.Caption(caption), pandoc.Attr(id))
end

local function Inlines(inlines)
  local done = pandoc.Inlines {}
  local position = 1
  while position <= #inlines do
    local inline = inlines[position]
    if inline.t == "Math" and inline.mathtype == "DisplayMath" then
      local after = position + 1
      while inlines[after] and (inlines[after].t == "Space" or inlines[after].t == "SoftBreak") do
        after = after + 1
      end
      local id = inlines[after] and inlines[after].t == "Str" and inlines[after].text:match("^{#(eq%-.+)}$")
      local body = pandoc.Inlines { pandoc.Span({ inline }, { class = "equation-body" }) }
      if id then
        body:insert(pandoc.Span("(" .. next_number(id) .. ")", { class = "equation-number" }))
        position = after
      end
      done:insert(pandoc.Span(body, pandoc.Attr(id or "", { "equation" })))
    else
      done:insert(inline)
    end
    position = position + 1
  end
  return done
end

-- References and links ---------------------------------------------------------------------------

-- A cross-reference. build.py fills it in once it knows the names of every page.
local function Cite(cite)
  local reference = cite.citations:find_if(function(citation) return kind_of(citation.id) end)
  if not reference then return nil end
  if #cite.citations > 1 or #reference.prefix > 0 or reference.mode == "SuppressAuthor" then
    fail(("write @%s by itself: nothing stands with a cross-reference in brackets"):format(reference.id))
  end
  return pandoc.RawInline("html", ('<x-ref to="%s"></x-ref>'):format(reference.id))
end

local function Link(link)
  if not link.target:match("^%a+:") then
    link.target = link.target:gsub("^/", root):gsub("%.qmd$", ".html"):gsub("%.qmd#", ".html#")
  end
  return link
end

local function Str(str)
  if str.text:match("^{{<") then fail("shortcode " .. str.text .. ": the plain build knows none") end
end

-- Tabs -------------------------------------------------------------------------------------------

local function tabset(div)
  tabsets = tabsets + 1
  local level = div.content[1] and div.content[1].t == "Header" and div.content[1].level
  if not level then fail("a .panel-tabset must start with a heading: the name of its first tab") end
  local tabs, panels, count = pandoc.Blocks {}, pandoc.Blocks {}, 0
  for _, block in ipairs(div.content) do
    if block.t == "Header" and block.level == level then
      count = count + 1
      local id = ("tabset-%d-%d"):format(tabsets, count)
      if count > 1 then panels:insert(raw("</div>")) end
      tabs:extend { raw(('<button type="button" role="tab" id="%s-tab" aria-controls="%s">'):format(id, id)),
        pandoc.Plain(block.content), raw("</button>") }
      panels:insert(raw(('<div class="tab-pane" role="tabpanel" id="%s" aria-labelledby="%s-tab">'):format(id, id)))
    else
      panels:insert(block)
    end
  end
  local blocks = pandoc.Blocks { raw('<div class="nav-tabs" role="tablist">') }
  blocks:extend(tabs)
  blocks:insert(raw("</div>"))
  blocks:extend(panels)
  blocks:insert(raw("</div>"))
  div.content = blocks
  return div
end

local function Div(div)
  local callout = div.classes:find_if(function(class) return class:match("^callout%-") end)
  if callout then fail("." .. callout .. ": the plain build knows no callouts, use a box of the book") end
  if div.classes:includes("panel-tabset") then return tabset(div) end
end

function Pandoc(doc)
  page, root = doc.meta.page[1].text, pandoc.utils.stringify(doc.meta.root or "")
  doc.blocks = doc.blocks:walk { Cite = Cite }
  if #pandoc.utils.references(doc) > 0 then doc = pandoc.utils.citeproc(doc) end
  local title, id = take_title(doc)
  doc.blocks = doc.blocks:walk {
    traverse = "topdown",
    Header = Header, Figure = Figure, Table = Table, Div = Div,
  }
  doc.blocks = doc.blocks:walk {
    Inlines = Inlines, Link = Link, Str = Str,
  }
  local meta = doc.meta
  local description = meta.description or {}
  if meta.footer then meta.footer = pandoc.List(meta.footer):map(function(text) return text:walk { Link = Link } end) end
  meta.pagetitle = pandoc.utils.stringify(title) .. " · " .. pandoc.utils.stringify(meta.book.title)
  meta["description-meta"] = pandoc.utils.stringify(description)
  for name, text in pairs { headline = meta.pagetitle, description = meta["description-meta"] } do
    meta[name .. "-json"] = pandoc.RawInline("html", (pandoc.json.encode(text):gsub("<", "\\u003c")))
  end
  meta.title = pandoc.MetaInlines(title)
  meta["title-id"] = id
  meta.index = pandoc.RawInline("html", pandoc.json.encode {
    title = pandoc.write(pandoc.Pandoc { pandoc.Plain(title) }, "html"):gsub("%s+$", ""),
    targets = next(targets) and targets or pandoc.json.null,
  })
  return doc
end
