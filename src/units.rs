//! Sizes, spans and points of time as people write them: `256M`, `64MiB`, `1500ms`, `5s`, `2h`,
//! `2026-12-01T07:00:00Z`.

use std::fmt;
use std::str::FromStr;
use std::time::{Duration, SystemTime};

use serde::{Deserialize, Serialize};
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

/// A number of bytes. Written with K, M, G or T (powers of 1024; `KiB` and so on mean the same).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Size(pub u64);

/// A span of time. Written with `ms`, `s`, `m`, `h` or `d`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Span(pub Duration);

/// A point of time. Written as RFC 3339.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Moment(pub OffsetDateTime);

/// A text that is not a size, a span or a point of time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum UnitError {
    /// Not a size.
    #[error("is not a size; write a whole number and K, M, G or T, as in `256M`")]
    Size,
    /// Not a span.
    #[error("is not a span of time; write a whole number and ms, s, m, h or d, as in `5s`")]
    Span,
    /// Not a point of time.
    #[error("is not a time; write it as RFC 3339, as in `2026-12-01T07:00:00Z`")]
    Moment,
}

const SIZES: &[(&str, u64)] =
    &[("T", 1 << 40), ("G", 1 << 30), ("M", 1 << 20), ("K", 1 << 10), ("", 1)];
const SPANS: &[(&str, u64)] =
    &[("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1000), ("ms", 1)];

impl Size {
    /// So many MiB.
    #[must_use]
    pub const fn mib(n: u64) -> Self {
        Self(n << 20)
    }
}

impl Span {
    /// So many seconds.
    #[must_use]
    pub const fn seconds(n: u64) -> Self {
        Self(Duration::from_secs(n))
    }
}

impl FromStr for Size {
    type Err = UnitError;
    fn from_str(text: &str) -> Result<Self, UnitError> {
        let plain = text.strip_suffix("iB").or_else(|| text.strip_suffix('B')).unwrap_or(text);
        scaled(plain, SIZES).map(Self).ok_or(UnitError::Size)
    }
}

impl FromStr for Span {
    type Err = UnitError;
    fn from_str(text: &str) -> Result<Self, UnitError> {
        let millis = scaled(text, SPANS).ok_or(UnitError::Span)?;
        Ok(Self(Duration::from_millis(millis)))
    }
}

impl Moment {
    /// By the clock on the wall.
    #[must_use]
    pub fn time(self) -> SystemTime {
        self.0.into()
    }
}

impl FromStr for Moment {
    type Err = UnitError;
    fn from_str(text: &str) -> Result<Self, UnitError> {
        OffsetDateTime::parse(text, &Rfc3339).map(Self).map_err(|_| UnitError::Moment)
    }
}

impl fmt::Display for Moment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Every year that can be read can be written.
        f.write_str(&self.0.format(&Rfc3339).unwrap_or_default())
    }
}

impl TryFrom<String> for Moment {
    type Error = UnitError;
    fn try_from(text: String) -> Result<Self, UnitError> {
        text.parse()
    }
}

impl From<Moment> for String {
    fn from(moment: Moment) -> Self {
        moment.to_string()
    }
}

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        unscaled(f, self.0, SIZES)
    }
}

impl fmt::Display for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        unscaled(f, u64::try_from(self.0.as_millis()).unwrap_or(u64::MAX), SPANS)
    }
}

impl TryFrom<String> for Size {
    type Error = UnitError;
    fn try_from(text: String) -> Result<Self, UnitError> {
        text.parse()
    }
}

impl TryFrom<String> for Span {
    type Error = UnitError;
    fn try_from(text: String) -> Result<Self, UnitError> {
        text.parse()
    }
}

impl From<Size> for String {
    fn from(size: Size) -> Self {
        size.to_string()
    }
}

impl From<Span> for String {
    fn from(span: Span) -> Self {
        span.to_string()
    }
}

fn scaled(text: &str, units: &[(&str, u64)]) -> Option<u64> {
    let end = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (digits, unit) = text.split_at(end);
    let (_, factor) = units.iter().find(|(name, _)| *name == unit)?;
    digits.parse::<u64>().ok()?.checked_mul(*factor)
}

fn unscaled(f: &mut fmt::Formatter<'_>, n: u64, units: &[(&str, u64)]) -> fmt::Result {
    let whole = units.iter().find(|(_, factor)| n > 0 && n.is_multiple_of(*factor));
    let (unit, factor) = whole.or(units.last()).copied().unwrap_or(("", 1));
    write!(f, "{}{unit}", n / factor)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_and_spans_are_read_and_written_alike() {
        for (text, bytes) in [("256M", 256 << 20), ("1G", 1 << 30), ("1025", 1025), ("0", 0)] {
            assert_eq!(text.parse(), Ok(Size(bytes)));
            assert_eq!(Size(bytes).to_string(), text);
        }
        assert_eq!("64MiB".parse(), Ok(Size::mib(64)));
        for (text, millis) in [("1500ms", 1500), ("5s", 5000), ("2h", 7_200_000), ("0ms", 0)] {
            assert_eq!(text.parse(), Ok(Span(Duration::from_millis(millis))));
            assert_eq!(Span(Duration::from_millis(millis)).to_string(), text);
        }
    }

    #[test]
    fn a_point_of_time_is_read_and_written_as_rfc_3339() {
        for text in ["2026-12-01T07:00:00Z", "2026-12-01T07:00:00+02:00"] {
            assert_eq!(text.parse::<Moment>().map(|at| at.to_string()).as_deref(), Ok(text));
        }
        let at = |text: &str| text.parse::<Moment>().map(Moment::time);
        assert_eq!(
            at("1970-01-01T02:00:07+02:00"),
            Ok(SystemTime::UNIX_EPOCH + Duration::from_secs(7))
        );
        for bad in ["", "07:00", "2026-12-01", "2026-12-01T07:00:00", "tomorrow", "1764572400"] {
            assert_eq!(at(bad), Err(UnitError::Moment), "{bad}");
        }
    }

    #[test]
    fn what_is_no_unit_is_refused() {
        for bad in ["", "M", "-1M", "1.5G", "1 M", "9999999999T", "5x", "1MM", "٣M"] {
            assert!(bad.parse::<Size>().is_err(), "{bad}");
        }
        for bad in ["", "s", "5", "5 s", "-1s", "1h30m", "99999999999999999999s"] {
            assert!(bad.parse::<Span>().is_err(), "{bad}");
        }
    }
}
