//! Numbers as people read them, the same in notes, reports, the model card and progress.

use std::time::Duration;

use wush_format::text::is_plain;

/// Bits of a code, or their average: "2", "2.25".
pub fn human_bits(bits: f64) -> String {
    let text = format!("{bits:.2}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

/// "0.4 s", "31 s", "2 min 05 s", "1 h 02 min": the one form of durations.
pub fn human_time(time: Duration) -> String {
    let seconds = time.as_secs();
    match seconds {
        0..10 => format!("{:.1} s", time.as_secs_f64()),
        10..120 => format!("{seconds} s"),
        120..3600 => format!("{} min {:02} s", seconds / 60, seconds % 60),
        _ => format!("{} h {:02} min", seconds / 3600, seconds % 3600 / 60),
    }
}

/// "1 sequence", "2 sequences".
pub fn counted(n: u64, what: &str) -> String {
    if n == 1 { format!("1 {what}") } else { format!("{n} {what}s") }
}

/// A ratio of at least one, such as a condition number: a plain decimal below 1000.
pub fn ratio(x: f64) -> String {
    if x < 1000.0 { format!("{x:.1}") } else { format!("{x:.1e}") }
}

/// A path or name as a shell takes it: quoted where it must be, and without what could draw on a terminal.
pub fn shell_word(word: &str) -> String {
    if !is_plain(word) {
        // bash, zsh and POSIX of 2024 read escapes between $' and '.
        let quoted = word.replace('\\', r"\\").replace('\'', r"\'");
        let escape = |c: char| if is_plain(c.encode_utf8(&mut [0; 4])) { c.to_string() } else { bytes_of(c) };
        return format!("$'{}'", quoted.chars().map(escape).collect::<String>());
    }
    let is_plain = |c: char| c.is_alphanumeric() || "/._-+@%:=,".contains(c);
    if !word.is_empty() && word.chars().all(is_plain) {
        return word.to_owned();
    }
    format!("'{}'", word.replace('\'', r"'\''"))
}

/// A character's UTF-8 as octal escapes.
fn bytes_of(c: char) -> String {
    c.encode_utf8(&mut [0; 4]).bytes().map(|byte| format!("\\{byte:03o}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_read_well() {
        let texts = [0.44, 31.0, 125.0, 3720.0].map(|s| human_time(Duration::from_secs_f64(s)));
        assert_eq!(texts, ["0.4 s", "31 s", "2 min 05 s", "1 h 02 min"]);
    }

    #[test]
    fn one_is_not_plural() {
        assert_eq!([0, 1, 2].map(|n| counted(n, "sequence")), ["0 sequences", "1 sequence", "2 sequences"]);
    }

    #[test]
    fn conditions_are_decimals_while_they_are_short() {
        assert_eq!([4.18, 999.94, 12_345.0, f64::INFINITY].map(ratio), ["4.2", "999.9", "1.2e4", "inf"]);
    }

    #[test]
    fn words_survive_a_shell() {
        assert_eq!(["a/b-1.x", "my model", "it's"].map(shell_word), ["a/b-1.x", "'my model'", r"'it'\''s'"]);
        assert_eq!(shell_word("a\n\u{1b}'x\\"), r"$'a\012\033\'x\\'");
    }
}
