"""One patch for each check that keeps an invariant: it takes the check away, and the test it names must notice."""
