"""What a person may ask for: the sweep file, its types and its documentation."""
