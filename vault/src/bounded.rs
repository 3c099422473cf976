//! The HTTP client of the store, whose answers have an end: a list, a refusal and what confirms an upload are
//! read whole into memory by the crate below, as long as they are said to be or as they go on.

use std::pin::Pin;

use http_body_util::{BodyExt, Limited};
use object_store::ClientOptions;
use object_store::client::{
    HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpResponse,
    HttpResponseBody, HttpService, ReqwestConnector,
};

/// The most bytes of one answer: those of a piece are told apart from more where it is read.
const MOST: usize = (8 << 20) + (1 << 16);

/// Makes such clients.
#[derive(Debug, Default)]
pub(crate) struct Bounded(ReqwestConnector);

#[derive(Debug)]
struct Client(HttpClient);

impl HttpConnector for Bounded {
    fn connect(&self, options: &ClientOptions) -> object_store::Result<HttpClient> {
        Ok(HttpClient::new(Client(self.0.connect(options)?)))
    }
}

// As `async_trait` writes it.
impl HttpService for Client {
    fn call<'a, 'b>(
        &'a self,
        request: HttpRequest,
    ) -> Pin<Box<dyn Future<Output = Result<HttpResponse, HttpError>> + Send + 'b>>
    where
        'a: 'b,
        Self: 'b,
    {
        Box::pin(async move {
            let (parts, body) = self.0.execute(request).await?.into_parts();
            let body = Limited::new(body, MOST).map_err(|error| match error.downcast() {
                Ok(known) => *known,
                Err(long) => HttpError::new_boxed(HttpErrorKind::Decode, long),
            });
            Ok(HttpResponse::from_parts(parts, HttpResponseBody::new(body)))
        })
    }
}
