//! Bars for whatever takes longer than a moment; hidden where nobody watches.

use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};

/// A bar over `total` units that shows `message` and the time left.
pub fn bar(total: u64, message: &str) -> ProgressBar {
    let bar = ProgressBar::new(total).with_message(message.to_owned());
    if let Ok(style) =
        ProgressStyle::with_template("{msg:<34} {bar:30} {percent:>3}% {eta:>4} left")
    {
        bar.set_style(style);
    }
    bar
}

/// A spinner for work whose length is unknown.
pub fn spinner(message: &str) -> ProgressBar {
    let bar = ProgressBar::new_spinner().with_message(message.to_owned());
    bar.enable_steady_tick(Duration::from_millis(120));
    bar
}
