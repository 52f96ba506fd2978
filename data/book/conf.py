"""How Sphinx makes the book. `./cookbook book` writes the pages, copies this file beside them and calls Sphinx."""

project = "Inference Acceleration Cookbook"
copyright = "the authors, Apache License 2.0"
html_title = project

extensions = ["myst_nb", "sphinx_copybutton", "utils.cookbook.book_math"]
exclude_patterns = ["_build"]
suppress_warnings = ["mystnb.unknown_mime_type"]

# What is shown is what is stored in the notebooks: nothing is executed here.
nb_execution_mode = "off"
nb_merge_streams = True
myst_enable_extensions = ["dollarmath", "colon_fence", "smartquotes"]
myst_dmath_allow_labels = False
myst_heading_anchors = 3
html_math_renderer = "mathml"

html_theme = "sphinx_book_theme"
html_context = {"default_mode": "auto"}  # light or dark, as the reader's system has it
html_theme_options = {
    "show_navbar_depth": 1,
    "show_toc_level": 2,
    "home_page_in_toc": False,
    "use_download_button": True,
    "use_fullscreen_button": False,
    "navigation_with_keys": False,
    "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "a11y-high-contrast-dark",
}
html_static_path = ["_static"]
html_css_files = ["book.css"]
html_copy_source = True
html_show_sourcelink = False
html_show_sphinx = False
html_use_index = False
html_show_search_summary = False  # summaries are fetched: not possible for a book opened from the disk
copybutton_exclude = ".linenos, .gp"
